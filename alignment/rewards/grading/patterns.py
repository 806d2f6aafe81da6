r"""Regular expressions over normalised text: what counts as a number, a unit, a sentence, a label.

Text is normalised before it is matched (`text.normalise`): a run of white space is one space,
commands such as \le, \cup and \infty are single signs (≤, ∪, ∞), and sizing commands and maths
delimiters are gone. Long expressions are written with `re.VERBOSE`, where `[ ]` is a space. Most
comments begin with examples of what the expression below them matches.
"""

import re

from alignment.rewards.grading.notation import TABLES

_VERBS = "|".join(TABLES["verbs"].split())
_SCALES = "|".join(TABLES["scales"])
_AMOUNTS = "|".join(TABLES["amounts"].split())
_GREEK = "|".join([*TABLES["greek"], *TABLES["greek_capitals"]])


# --- numbers and quantities

# 12; 1,234; 3.14; 5.; .5
NUMBER = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+")

# -5; 1.5e-3; 1.5 * 10^{3}; 3rd. Groups: sign, number, exponent.
SCALAR = re.compile(
    rf"""
    ([-+]?) [ ]? ({NUMBER.pattern})
    (?:
        [ ]? (?: [eE] | \*[ ]?10[ ]?\^ ) [ ]? ( [-+]?[0-9]{{1,3}} | \{{[ ]?-?[0-9]{{1,3}}[ ]?\}} )
        | [ ]? (?:st|nd|rd|th)
    )?
    """,
    re.VERBOSE,
)

# 1.5 million dollars. Groups: the number and what is before it, the word, what is counted.
SCALED = re.compile(rf"(.*(?:{NUMBER.pattern})) ?({_SCALES})s?(?: ([A-Za-z].*))?")

# 0.1666... (decimals without end). Groups: sign, digits before the point, digits after it.
ENDLESS = re.compile(r"([-+]?)([0-9]*)\.([0-9]{1,60}) ?\.\.\.")

# 101_2; (101)_{two}; 101 (base 2). Groups 1 to 3: digits, the base if it is a subscript, the base
# if it follows the word "base". A subscript may be said again: 101_2 (base 2).
# 0x1F. Groups 4 and 5: the letter of the prefix, digits.
BASED = re.compile(
    r"""
    \(?[ ]? ( [0-9A-Fa-fG-Z] [0-9A-Fa-fG-Z ]{0,60}? ) [ ]?\)? [ ]?
    (?:
        _[ ]?\{?[ ]?\(? (?:base[ ]?)? ( [0-9]{1,2} | [a-z]+ ) \)?[ ]?\}?
        | [ ]\(?base[ -] ( [0-9]{1,2} | [a-z]+ ) \)?
    )
    (?: [ ]\(?base[ ](?:\2)\)? )?
    | 0([xXbo]) ([0-9A-Fa-f]{1,60})
    """,
    re.VERBOSE,
)

# 5 \pmod{7}; 5 (mod 7). Groups: the remainder, the modulus.
_MODULUS = r"\\?\(? ?(?:\\pmod|\\bmod|\\mod|mod) ?\{? ?([0-9]{1,40}) ?\}? ?\)?"
MODULO = re.compile(rf"(.*[0-9]) ?{_MODULUS}")
# x ≡ 3 (mod 7); x ≡ 1, 3 (mod 8). Groups: the left side, the residues, the modulus.
CONGRUENCE = re.compile(rf"([^≡]*?) ?≡ ?((?:(?!mod)[^≡])*?) ?{_MODULUS}")

# 12 cows; 3 red pens
COUNT = re.compile(r"[0-9.]+ [A-Za-z]+(?: [A-Za-z]+){0,2}")
# 72 (clips), 72 [cm]. Groups: the amount, the unit.
UNIT_IN_BRACKETS = re.compile(r"(.*[0-9}\])]) ?[(\[]([A-Za-z]{2,}(?: [a-z]+){0,2})[)\]]")

# 30\degree 15' 20". Groups: degrees, minutes, seconds.
MINUTES = re.compile(
    r"""
    ([0-9]+) [ ]?\\degree[ ]?
    ([0-9]+ (?:\.[0-9]+)?) [ ]?'
    (?: [ ]? ([0-9]+ (?:\.[0-9]+)?) [ ]? (?: " | '' ) )?
    """,
    re.VERBOSE,
)

# 7:30:15 pm; 5 o'clock; 12 noon; 5 o'clock pm. Groups: hour, minute, second, the word after them,
# and "am" or "pm" after that word.
CLOCK = re.compile(
    r"""
    ([0-9]{1,2}) (?: :([0-9]{2}) )? (?: :([0-9]{2}) )?
    [ ]? ( a\.?m\.? | p\.?m\.? | o'clock | noon | midnight )?
    (?: [ ](am|pm) )?
    """,
    re.VERBOSE | re.IGNORECASE,
)

# -$5. Groups 1 to 3: sign, currency, amount. 5 €. Groups 4 and 5: amount, currency.
MONEY = re.compile(
    r"""
    ([-+]?) [ ]? (?:US|USD|CA|AU|C|A)? ([$£€¥₹]) [ ]? (?=[-0-9.\\]) ([^$£€¥₹]*)
    | ([^$£€¥₹]*[0-9]) [ ]? ([$£€¥₹])
    """,
    re.VERBOSE,
)
# USD 5. Groups: the code, the amount.
MONEY_CODE = re.compile(r"(USD|EUR|GBP|INR|Rs\.?) ?([0-9].*)")
# 18 per day; 2 million. This reads what an amount of money is without its currency. Groups: the
# amount, what follows it.
AMOUNT_PER = re.compile(
    r"([-+]? ?[0-9.,]*(?: ?(?:hundred|thousand|million|billion|trillion)\b)?)(.*)"
)

# 50%; 50 percent of the apples. Groups: the number, the words after the sign or "percent".
PERCENT = re.compile(
    r"""
    ([-+]? [^%+*-]* [0-9)}])
    [ ]? (?: % | percent (?:age[ ]points?)? | per[ ]cent | pct )
    ([ ] [a-z ]{1,30})?
    """,
    re.VERBOSE,
)
# Words after a percent sign that do not change the answer: 50% chance; 50% of the apples.
SHARE_WORDS = re.compile(
    r"""
    [ ]
    (?:
        chance | probability | interest
        | of[ ] (?:the|all|his|her|their|its|these) (?:[ ][a-z]+){1,3}
    )
    """,
    re.VERBOSE,
)

# 5 cm^2; 2\pi metres. Groups: the amount, the space after it, the unit.
AMOUNT = re.compile(
    r"""
    (.*? (?: [0-9)}\]] | \\pi | [0-9 ]pi ))
    ([ ]?)
    ((?: \\degree | \\Omega | \\mu[ ] | [A-Za-zµΩ°¢£$Å\u4e00-\u9fff] ) .*)
    """,
    re.VERBOSE,
)


# --- units

# cm^2; m * (one factor of a unit, with the sign before the next factor). Groups: name, power.
FACTOR = re.compile(
    r"""
    [ ]? ([A-Za-zµΩ°¢£Å\u4e00-\u9fff]+\.?)
    (?: [ ]?\^[ ]?\{?[ ]? (-?[0-9]) [ ]?\}? )?
    (?: [ ]?[*-] )?
    """,
    re.VERBOSE,
)

# sixteenths; twenties; quadrillion. These are numbers, so "5 sixteenths" has no unit.
NUMBER_NOUN = re.compile(
    r"""
    # by the ending: thirteen, twentieth, sixties, hundredth, thousandths, million, billionth
    \w*
    (?:
        teen(?:th)? | tieth | (?:twen|thir|for|fif|six|seven|eigh|nine)tie
        | dredth | sandth | ll?ion | ll?ionth
    )s?
    | (?: eleven | twel[fv]e? )(?:th)?s?
    | (?: four|fif|six|seven|eigh|nin|ten )ths?
    """,
    re.VERBOSE,
)

# cats; boxes; classes. A word in -ss, such as class, is no plural.
PLURAL = re.compile(r"[a-z]{2,}(?<!s)s|[a-z]{2,}(?:sse|e)s")

# Words after a quantity that do not change the answer: 5 in total; 5 of the apples.
TRAILING_WORDS = re.compile(
    r"""
    [ ]
    (?:
        old | long | tall | wide | high | deep | away | left | remaining
        | total | in[ ]total | in[ ]all | altogether | overall | combined | together
        | each | apiece | exactly | precisely
        | of[ ] (?:the|a|an|all|his|her|their|its) (?:[ ][a-z]+){1,3}
    )$
    """,
    re.VERBOSE,
)


# --- words, options and sentences

ARTICLE = re.compile(r"\b(?:the|an?) (?=\w)")

# snow-white; o'clock; two words. Letters are those of any alphabet.
WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[' -])*")

# ab; xy; pqr. These are products of variables and no words: they have two or three letters, none
# of them a vowel but y, or their letters stand in order among a to d or x to z.
LETTER_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}|a?b?c?d?|x?y?z?")

# 12 - the total; 12: the total. Words after a sign that is no part of a formula.
WORDS_AFTER_SIGN = re.compile(r"[0-9)}\]] ?[-:] [a-z]{2,} [a-z]{2,}[a-z ]*")

# (A); A.; the correct option is A. Group: the letter.
OPTION = re.compile(
    r"""
    (?i: (?:the[ ])? (?:correct[ ]|right[ ]|best[ ])? (?:option|choice|answer)[ ] (?:is[ ])? )?
    \(? ([A-Ja-j]) \)? [.):]?
    """,
    re.VERBOSE,
)
# A, C; AC; (A) and (C)
OPTIONS = re.compile(r"\(?[A-J]\)?(?:(?:, ?| ?and |, and | )?\(?[A-J]\)?){1,9}")
# (B) 12; B: 12. Groups: the letter in brackets, the letter without, the option's text.
OPTION_TEXT = re.compile(r"(?:(?i:option|choice) )?(?:\(([A-J])\)[:.]?|([A-J])[).:]) ?(?=\S)(.*)")
# (C); B:; and. An option's text with one of these may name a second option. The letter A may be an
# article, so it counts only with a sign.
OTHER_OPTION = re.compile(r"\([A-J]\)|\b[A-J][).:]|\b[B-J]\b|\band\b")

# So there are 15 ways. Group: the text from the number or formula on.
SENTENCE = re.compile(
    rf"""
    (?: [A-Za-z']+,?[ ] ){{0,20}}
    (?: {_VERBS} | equal[ ]to | there[ ](?:are|were) | total[ ]of | an?[ ](?:{_AMOUNTS})[ ]of
        | left[ ]with )
    (?: [ ] (?:him|her|them|it|us|me|you) )?
    (?: [ ] (?:now|still|exactly|only|just|all|a[ ]total[ ]of|equal[ ]to) )?
    [ ] (?=[-0-9$£€¥\\(\[{{]) (.*)
    """,
    re.VERBOSE,
)
# 一共有15种方法. Group: the text from the number or formula on.
CHINESE_SENTENCE = re.compile(
    r"""
    [\u4e00-\u9fffA-Za-z,\ ]{0,30}
    (?: 是|为|有|等于|得|共|需|要|剩|剩下 | (?<![加少多])了 | [\u4e00-\u9fff]: ) [ ]?
    ([-+\\$0-9A-Za-z({\[].* | [负零一二两三四五六七八九十百千].*)
    """,
    re.VERBOSE,
)
# The function is odd. Group: the predicate.
PREDICATE = re.compile(r"(?:[a-z]+ ){1,5}(?:is|are|was|were) (.*)")
# 15 every day; 15 for the trip. Groups: the answer, the end of the sentence if there is one, the
# words of this end after its first.
SENTENCE_END = re.compile(r"(.*?)( (?:every|each|at|in|for|on|with|by|after|to) ([A-Za-z' ]+))?")
# 1/4 (or 0.25). Groups: the two forms of the answer.
SAME_AGAIN = re.compile(r"(.*[^ ]) \((?:or|=|i\.e\.,?|which is|that is,?) ?(.*)\)")
# five (5); thirty-two (32). Groups: the number in words, the same in digits.
NUMBER_AGAIN = re.compile(r"([A-Za-z]+(?:[ -][A-Za-z]+)*) \(([0-9][0-9,./]*)\)")
# A clause about a free parameter begins with a word (x = 2k, where k is an integer), or with the
# parameter or "for integers" (x = 2k, k ∈ ℤ).
CLAUSE_WORD = re.compile(r"(?:, ?| )(?:where |for |with )")
CLAUSE_VARIABLE = re.compile(
    r", ?(?=[a-z] ?∈|[a-z] (?:is an? )?(?:any )?integer)| (?=for integers?\b)"
)
# The whole clause: ", where k is an integer"; " for integers k". Groups: the name of the parameter
# if it follows "integer", its name if it comes first.
CLAUSE = re.compile(
    r"""
    (?:,|[ ])? [ ]?
    (?: (?:where|for|with|and)[ ] )?
    (?: (?:all|any|every|some)[ ] )?
    (?:
        integers?[ ]([a-z])
        | ([a-z]) (?:[ ]is)? (?: [ ]?∈[ ]?[ℤℕ] | [ ]an?(?:y|ll)?[ ]integer | [ ](?:any[ ])?integer )
    )
    """,
    re.VERBOSE,
)
# About 5; 5 (approximately). Groups: the answer after the word, the answer before it.
ABOUT = re.compile(
    r"""
    (?:is[ ])? (?:about|approximately|approx\.?|around|roughly|nearly|almost|≈)[ ] (.*)
    | (.*)[ ] \(?(?:approximately|approx\.?)\)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Runs of letters. The group is empty for the name of a command.
BARE_LETTERS = re.compile(r"\\[A-Za-z]+|([A-Za-z]+)")


# --- structures

# x; x_1; \alpha_{12}; y'
VARIABLE = re.compile(rf"(?:[A-Za-z]|\\(?:{_GREEK}))(?:_\{{?\w{{1,4}}\}}?)?'*")

_ANGLE = r"(?:m[ ]?)? \\(?:angle|overline) [ ]?\{?[A-Za-z]{1,3}\}?"
_ARGUMENT = "(?:[a-z]|[0-9]{1,4})"
# The left side of `label = answer`.
LABEL = re.compile(
    rf"""
    {VARIABLE.pattern}
    # f(x), f^{{-1}}(x), g'
    | [fgh] (?: \^[ ]?(?:\{{[ ]?-1[ ]?\}}|-1) )? '* (?: [ ]?\([^()=]{{1,12}}\) )?
    # a probability or an expectation
    | [PE] [ ]?\([^()]{{1,20}}\)
    # f(f(x)), [ABC], S_{{\triangle ABC}}
    | [fgh] [ ]?\( [^()=]{{0,8}} \([^()=]{{1,8}}\) [^()=]{{0,8}} \)
    | \[[A-Z]{{3,6}}\]
    | [A-Z]_\{{[ ]?(?:\\triangle[ ])?[ ]?[A-Z]{{3,4}}[ ]?\}}
    # u(x, y), p(17)
    | {VARIABLE.pattern} [ ]?\( {_ARGUMENT} (?: ,[ ]?{_ARGUMENT} ){{0,2}} \)
    # an angle, a side, a length, sets
    | {_ANGLE} (?: [ ]?[+-][ ]?{_ANGLE} ){{0,3}}
    | [A-Z]{{2,3}}
    | \|?[A-Z]{{2}}\|?
    | [A-Z] (?: [ ]?[∪∩∖][ ]?[A-Z] ){{1,3}}
    | n?[|(][ ]? [A-Z] (?: [ ]?[∪∩∖][ ]?[A-Z] ){{1,3}} [ ]?[|)]
    # several values, an extreme value, a ratio, a composition: x_{{1,2}}, f_{{max}}, \max f, a:b
    | [A-Za-z]_\{{ [ ]? (?: [0-9],[ ]?[0-9] | \\?[A-Za-z]{{1,12}} ) [ ]? \}}
    | \\(?:max|min) (?: [ ]?[a-z] | [ ]?\([^()]{{1,20}}\) | [ ]?\{{[^{{}}]{{1,20}}\}} )?
    | [A-Za-z]{{1,2}}(?:_\w)? (?: [ ]?:[ ]?[A-Za-z]{{1,2}}(?:_\w)? ){{1,3}}
    | \([fgh][ ]?\\circ[ ]?[fgh]\) [ ]?\([^()=]{{1,12}}\)
    | \\triangle[ ]?[A-Z]{{3}}
    # words
    | [A-Za-z]{{3,}} (?:[ ][A-Za-z]+){{0,6}}
    | [\u4e00-\u9fff]{{1,8}}
    # (x, y), x-coordinate
    | \([a-z] (?: [ ]?,[ ]?[a-z] ){{1,3}}\)
    | [A-Za-z]+-(?:coordinate|intercept)
    # an operator of one thing: \det A, \dim(V), \Pr(X = 3), \mathbb{{E}}[X], Area(ABC)
    | (?: \\(?:det|dim|deg|ker|arg|Pr|mathbb\{{[PE]\}}) | tr | rank | Pr | Var | [Aa]rea | [Vv]ol )
      [ ]? (?: \([^()]{{1,20}}\) | \[[^\[\]]{{1,20}}\] | [A-Z](?:_\{{?\w\}}?)? )
    | \\(?:sin|cos|tan|cot|sec|csc) [ ]? \(?[ ]? \\angle [ ]?\{{?[A-Z]{{1,3}}\}}? [ ]?\)?
    # the length of a vector: \|v\|, \|a + b\|
    | \\\| [^|=]{{1,20}} \\\| (?:[ ]?\^[ ]?\{{?2\}}?)?
    # a sum, a product, a limit, an integral of something that is not given: a_n, f(x)
    | \\(?:sum|prod|lim|int) (?![A-Za-z]) .{{0,40}}
      (?: [a-z]_\{{?\w+\}}? | [fgh][ ]?\([^()]*\) ) [^=]{{0,10}}
    # words and a figure: Area of \triangle ABC
    | [A-Za-z]{{3,}} (?:[ ][A-Za-z]+){{0,4}} [ ]? \\triangle [ ]?[A-Z]{{3}}
    # a derivative
    | d[a-z]/d[a-z]
    | \\frac\{{d[a-z]\}}\{{d[a-z]\}}
    """,
    re.VERBOSE,
)

# cows: 12, pigs: 7; k: 7. What stands before each colon is a label.
COLON_LABELS = re.compile(
    r"""
    (?: [a-z] | [A-Za-z]{3,} (?:[ ][A-Za-z]+){0,3} ) :[ ] [^:=]+
    (?: (?: [,;][ ]? | [ ]and[ ] ) [A-Za-z]+ (?:[ ][A-Za-z]+){0,3} :[ ] [^:=]+ )*
    """,
    re.VERBOSE,
)
# cows 12; the length is 8 cm; Ann has 5; 最大值为5. Groups: the name, the number with its unit.
NAMED_NUMBER = re.compile(
    r"""
    (?:
        (?:the[ ])? (?P<name>[A-Za-z]{3,} (?:[ ][A-Za-z]+){0,2}?) [ ]
        (?: (?:is|are|was|were|has|have|had|gets?|got)[ ] )?
        | (?P<chinese>[\u4e00-\u9fff]{1,8}?) (?:为|是|有|等于)? [ ]?
    )
    (?P<value>[$£€]?[ ]?-?[0-9][^=:,;]*)
    """,
    re.VERBOSE,
)
# x = 1 and y = 2; x = 1, y = 2. The beginning of the values of several variables.
ASSIGNMENTS = re.compile(r"[a-z](?:_\{?\w\}?)? ?= ?[^=]*(?:,| and) ?[a-z](?:_\{?\w\}?)? ?=")
# rate * time; speed / distance. A formula whose names are words.
FORMULA_OF_WORDS = re.compile(
    r"""
    {words} (?:[ ]?[-+*/][ ]?{words}){{1,4}}
    | \\frac[ ]?\{{[ ]?{words}[ ]?\}}[ ]?\{{[ ]?{words}[ ]?\}}
    """.format(words="[A-Za-z]{3,}(?:[ ][A-Za-z]+){0,4}"),
    re.VERBOSE,
)

# 1 + 3 + ... + 19. A sum or product with dots, which is not decided.
SERIES = re.compile(r"[-+*^{}()!_\\/ 0-9a-z]+[-+*,] ?\.\.\. ?[-+*,][-+*^{}()!_\\/ 0-9a-z]+")

# {x | x > 3}. Groups: the variable, the condition.
SET_BUILDER = re.compile(r"\{ ?([a-z])(?: ?∈ ?ℝ)? ?[|:] ?(.*)\}")
# \begin{pmatrix} 1 & 2 \end{pmatrix}. Groups: the environment, its content.
MATRIX = re.compile(
    r"""
    \\begin[ ]?\{ ([pbvBV]?matrix|smallmatrix|array) \}
    (?: [ ]?\{[lcr| ]+\} )?
    (.*)
    \\end[ ]?\{\1\}
    """,
    re.VERBOSE,
)
# f(x) = \begin{cases} ... \end{cases}. Groups: the label before the environment, its content.
CASES = re.compile(r"(?:([A-Za-z][^=&]{0,12})= ?)?\\begin ?\{cases\}(.*)\\end ?\{cases\}")
# "if x > 0," in a row of cases. Group: the condition.
CONDITION = re.compile(r" *(?:(?:if|when|for|where) )?(.*?)[ ,.]*")


# --- which texts go to the library math-verify

# A text goes there only if it has one of these commands, which our own grammar reads in some places
# only, or never.
FOREIGN = re.compile(r"\\(?:begin|sum|prod|int|lim)(?![A-Za-z])")

# A broken formula: empty braces, a sign without an operand at an end, a command without arguments.
INCOMPLETE = re.compile(
    r"""
    \{[ ]?\}
    | [-+*/^_=<≤∪∩∖][ ]?$ | ^[ ]?[*/^_=<>≤≥∪∩∖]
    | \\(?:frac|binom) (?! [ ]? (?: \{[^{}]* (?:\{[^{}]*\}[^{}]*)* \}[ ]? ){2} )
    | \\(?:sqrt|sum|prod|int|lim|begin) (?! [ ]?[\[{_A-Za-z0-9] )
    """,
    re.VERBOSE,
)
# The sign of any power; a power with a short exponent that is no power or product itself; a power
# with digits in its exponent (group: the digits).
POWER = re.compile(r"\^|\*\*")
SMALL_POWER = re.compile(r"\^ ?(?:[\w∞]|\{ ?-? ?[\w∞]{1,2} ?\})(?! ?[\^*!])")
EXPONENT = re.compile(r"\^ ?\{? ?-? ?([0-9]+)")
# What may take long to compute: large numbers and factorials, binomials of expressions, gamma
# functions, five roots or more. Also two digits after a \frac, which math-verify misreads.
LARGE = re.compile(
    r"""
    [0-9]{7}
    | \\frac[ ]?[0-9]{2}
    | ![ ]?! | [0-9]{3}[ ]?!
    | \\binom (?! [ ]?\{[ ]?[\w+-]{1,5}[ ]?\} [ ]?\{[ ]?[\w+-]{1,5}[ ]?\} )
    | \\Gamma
    | (?:\\sqrt.*){5}
    """,
    re.VERBOSE,
)
# What no single expression contains: words, numbers side by side, and signs such as ! and ≈. Also
# numbers of 16 digits.
UNCLEAR = re.compile(r"""[A-Za-z]{2}|[0-9]{16}|[0-9] +[0-9]|[!'"`:;$%#~?≈∅]|\.\.""")
