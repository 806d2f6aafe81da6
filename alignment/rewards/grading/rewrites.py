r"""The rewriting of spellings, in order: LaTeX, Markdown and code become the form that is read.

Later rules rely on earlier ones: digits are joined before sizing commands go, text commands are
opened before signs get one character each, and maths delimiters go last.
"""

import re
from collections.abc import Callable

from alignment.rewards.grading.notation import TABLES

Replacement = str | Callable[[re.Match[str]], str]

_SIGN_OF_COMMAND: dict[str, str] = {}
for _sign, _commands in TABLES["signs"].items():
    _SIGN_OF_COMMAND |= dict.fromkeys(_commands.split(), _sign)


def _write_sign(match: re.Match[str]) -> str:
    r"""The sign of a command, ≤ of \leq; the command itself where the table of signs has none."""
    sign = _SIGN_OF_COMMAND.get(match[1])
    if sign is None:
        return match[0]
    return f" {sign} "


def _join_digits(match: re.Match[str]) -> str:
    return re.sub(r"[ '_\\]", "", match[0])


def _nested_calls(match: re.Match[str]) -> str:
    r"""Calls of two operands each, with braces: \gcd{\gcd{12}{18}}{30} of gcd(12, 18, 30)."""
    name = match[1].lower()
    first, *others = [operand.strip() for operand in match[2].split(",")]
    if not others or len(others) > 9 or not all([first, *others]):
        return match[0]
    call = first
    for operand in others:
        call = rf"\{_CALLED.get(name, name)}{{{call}}}{{{operand}}}"
    return f" {call} "


_CALLED = {"hcf": "gcd"}  # the highest common factor


def _choose(match: re.Match[str]) -> str:
    r"""A binomial coefficient for the letter C, and n!/(n - k)! for P or A, which arrange."""
    number, letter, chosen = match["number"], match["letter"], match["chosen"]
    if number.isdigit() and chosen.isdigit() and int(chosen) > int(number):
        return match[0]
    if letter in "Cℂ":
        return rf"\binom{{{number}}}{{{chosen}}}"
    return rf"\frac{{({number})!}}{{({number}-{chosen})!}}"


def _write_script(match: re.Match[str]) -> str:
    """An index or a power of HTML in LaTeX."""
    return f"{'_' if match[1] == 'b' else '^'}{{{match[2]}}}"


def _write_scale(match: re.Match[str]) -> str:
    """The amount with its scale as a word: 70 thousand of 70k."""
    scale = {"k": "thousand", "m": "million", "b": "billion"}[match[2][0].lower()]
    return f"{match[1]} {scale}"


def _half_of_day(match: re.Match[str]) -> str:
    """A time with its half of the day: 3 pm of 下午3点."""
    return f"{match[2]} {'am' if match[1] == '上午' else 'pm'}"


def _without_remark(match: re.Match[str]) -> str:
    """Nothing, unless the remark has a word that denies, hedges or computes."""
    words = re.findall("[a-z]+", match[0].lower())
    if _QUALIFYING.isdisjoint(words):
        return ""
    return match[0]


_QUALIFYING = frozenset(TABLES["qualifying_words"].split())
_POSSESSIVE = "(?:the|our|his|her|their|its)"
_REMARKS = "|".join(TABLES["remarks"])

_COMPARED = "(?:many|much|large|big|long|old|tall|far|fast|heavy|likely)"
_SUBJECT = "(?:it|they|he|she|we|that|there)"
_AUXILIARY = "(?:is|are|was|were|do|does|did|can|will|has|have)"

# The index of a number before or after the C of a binomial coefficient.
_INDEX = r"\s*\{{?\s*(?P<{}>[0-9]{{1,4}}|[a-z])\s*\}}?\s*"


def _open_alignment(match: re.Match[str]) -> str:
    r"""The lines of an environment such as align: a line that begins with = goes on the one before,
    others are listed. An environment that holds another one, such as a matrix, stays."""
    lines = match["lines"]
    if match["name"].startswith("equation"):
        return f" {lines} "
    if r"\begin" in lines:
        return match[0]
    lines = re.sub(r"\\\\\s*&?\s*=", " =", lines.replace("&=", "="))
    lines = re.sub(r"\s*(?:\\\\\s*)+$", "", lines).replace("&", " ")
    listed = ", ".join(lines.split(r"\\"))
    return f" {listed} "


# Chinese words that lead to an answer: "therefore", "the final answer is".
_CHINESE_THEREFORE = "(?:所以|因此|因而|从而|于是|综上所述|综上|解得|可得|故|则|即)"
_CHINESE_LEAD = (
    rf"^(?:{_CHINESE_THEREFORE}[, ]*)*(?:(?:本题|此题|最终|最后|正确)的?)*"
    r"(?:答案|结果)(?:就|应)?(?:是|为|等于|:)\s*:?"
)


def _any_of(commands: str) -> str:
    """A regular expression for one of several names, the first that fits."""
    return f"(?:{'|'.join(commands.split())})"


# Commands of size and layout, which state nothing.
_LAYOUT = _any_of(
    "left right tiny small normalsize large Large LARGE huge Huge big Big bigg Bigg "
    "bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm "
    "displaystyle textstyle scriptstyle limits nolimits"
)
# Commands whose argument is the text itself.
_WRAPPERS = _any_of(
    "text mathrm textbf mathbf textit textrm mathit mathsf mbox operatorname textnormal boldsymbol "
    "bm rm bf hat vec mathtt texttt mathcal textsf underline hbox emph boxed fbox framebox "
    "overrightarrow ensuremath num"
)
# Text in braces, which may hold two levels of braces.
_ONE_LEVEL = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
_BRACED = rf"\{{([^{{}}]*(?:\{{{_ONE_LEVEL}\}}[^{{}}]*)*)\}}"
_BLACKBOARD = _any_of("mathbb mathbf mathrm Bbb")
_VECTOR = r"(?:mathbf|boldsymbol|hat|vec|bm|mathrm\{\\mathbf)"

_CHINESE_COUNTERS = "|".join(TABLES["chinese_counters"].split())
_CHINESE_TIMES = "小时|分钟|秒|天|周|月|年"

# "So, the final answer is:", "####", "=" before an answer.
_LEAD = (
    r"(?i)^(?:#### ?|= ?)?"
    r"(?:(?:so|thus|therefore|hence|and|finally|in conclusion|at(?! (?:least|most))),? )?(?:→ )?"
    r"(?:(?:the |my |our |your )?(?:(?:final|correct|exact) )?"
    r"(?:answers?|solutions?|roots?|results?|values?|remainders?(?: when [^.;]{1,60}? is divided by"
    r" [^.;]{1,30}?)?)(?: (?:is|are):?|:| ?=) ?){0,2}"
    r"(?:(?:it|this|that)'s |final answer (?=[-0-9$\\(]))?"
)

_RULES: list[tuple[str, Replacement]] = [
    # Digits that repeat without end: a bar or a dot over them becomes \overline{...}.
    (r"([0-9])[\u0304\u0305]", r"\\overline{\1}"),
    # A dot over the first and one over the last digit is a bar over all of them.
    (
        r"\\dot\s*\{?([0-9])\}?([0-9]{0,18})\\dot\s*\{?([0-9])\}?",
        r"\\overline{\1\2\3}",
    ),
    (r"\\(?:bar|dot)\s*\{?([0-9]+)\}?", r"\\overline{\1}"),
    # One bar over each of two digits is one bar over both.
    (r"\}(?<=\\overline\{[0-9]\})\\overline\{(?=[0-9]\})", ""),
    # A formula alone in a text command.
    (r"^\\(?:text|mbox)\s*\{\s*\$([^$]*)\$\s*\}$", r"\1"),
    # The sign √ and sloppy LaTeX cover the whole number.
    (r"\\sqrt(?=[0-9])([0-9]+)", r"\\sqrt{\1}"),
    # A difference in words, at the end: "$5 more". Before a noun or "than" the word stays.
    (r"(?<!or )((?<!\S)[$£€]?[0-9][0-9,]*(?:\.[0-9]+)?) more(?=[.]?$)", r"\1"),
    (r"^([$£€]?[0-9][0-9,]*(?:\.[0-9]+)?) (?:fewer|less)(?=[.]?$)", r"\1"),
    # Markdown: what is struck out is not stated; headings, and emphasis by * and _. A sign of
    # emphasis stands at a word's outside: 2*3*4 and 2**3 are products and powers.
    (r"~~.*?~~", " "),
    (r"^(?:=>|->|[⇒⟹➜])\s*|^\*\s+(?=[-0-9$\\])|^-{3,}\s+|\s+-{3,}$", ""),
    (r"<su([bp])>\s*([^<>]{1,9}?)\s*</su\1>", _write_script),
    (r"&nbsp;", " "),
    (r"^#{1,6} (?!#)|^```(?:[a-z]*\s)?|```$|</?(?:b|i|u|em|strong|mark|span|p|code)>", ""),
    (
        r"(?:(?<=[A-Za-z:,=.$][ ])|(?<=[=:])|(?<![^\s(])(?<![\w)}\]] ))"
        r"(\*{1,3})(?=[^\s*])([^*]*[^\s*])\1(?=[.,:;!?)\s]|$)",
        r"\2",
    ),
    (r"^(__?)([^_]+)\1(?=[.]?$)", r"\2"),
    # Chinese: words before the answer, conjunctions, percentages and large units of counting.
    (_CHINESE_LEAD, ""),
    (rf"^(?:{_CHINESE_THEREFORE}[, ]*)+(?=[-+\\$0-9A-Za-z(])", ""),
    (r"^(?:故|应|所以|因此)?正确选项(?:为|是|:)*\s*(?=\(?[A-J])|(?<=^[A-J])选?项$", ""),
    (r"^(?:故|应|所以|因此)?(?:答案)?选择?(?:项|为|:)*\s*(?=\(?[A-J])", ""),
    (r"百分之\s*([0-9.]+)", r"\1%"),
    (r"^负\s*(?=[0-9\\$])", "-"),
    (r"根号下?\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
    (r"(?<![0-9.])([0-9]+)分之([0-9]+)(?![0-9.])", r"\\frac{\2}{\1}"),
    (r"(?<=[0-9])又(?=\\frac)", " "),
    (r"(?<=[0-9一二两三四五六七八九十])个(?=小时|星期)", ""),
    (r"(?<=[0-9])点半(?!\w)", ":30"),
    (r"^点\s*(?=\()", ""),
    (r"([a-z])\s*(?:为|是)(?:任意)?整数", r"\1 ∈ ℤ"),
    (r"(?<=[0-9])点([0-9]{2})分", r":\1"),
    (r"(上午|下午|晚上)([0-9]{1,2}(?::[0-9]{2})?)[点时]?(?!\w)", _half_of_day),
    (r"(?<=[0-9])分(?=[0-9]+秒)|(?<=时[0-9])分(?!\w)|(?<=时[0-9][0-9])分(?!\w)", "分钟"),
    (r"(?<=[0-9])比(?=[0-9])", ":"),
    (r"^【\s*(?:正确|最终)?(?:答案|解答|答)\s*】\s*:?|^【([^【】]*)】$", r"\1"),
    # 鸡20只 is 20只鸡, and 每小时60千米 is 60千米/小时.
    (rf"(?:每|一)({_CHINESE_TIMES})(?:行驶?|走|跑)?([0-9.]+)([\u4e00-\u9fff]{{1,3}})$", r"\2\3/\1"),
    (
        rf"(?<![\u4e00-\u9fff])(?!第)([\u4e00-\u9fff]{{1,4}}?)[有是:]?\s*([0-9]+)({_CHINESE_COUNTERS})(?![\u4e00-\u9fff])",
        r"\2\3\1",
    ),
    (r"(?<=[0-9])\s*万", "*10^4"),
    (r"(?<=[0-9])\s*亿", "*10^8"),
    (r"(?<=[0-9A-Za-z)\]}$%])[, ]*(?:或者|或是|或)\s*", " or "),
    (r"(?<=[0-9A-Za-z)\]}$%])\s*(?:以及|和|与|及|且)\s*(?=[-+\\$0-9A-Za-z(])", " and "),
    # 10{,}000, 10\,000, 10~000 and 10,\! 000 are one number, also its decimals in groups of three,
    # 0.123\,456.
    (r"\\thinspace(?![A-Za-z])", r"\\,"),
    (r"(?<=[0-9])\\(?:text|mathord|mathpunct|mbox|mathrm)\s*\{,\}(?=[0-9])", "{,}"),
    (
        r"(?<=[0-9])\s*(?:\{,\}(?:\\[,!])*\s*|,?(?:\\[,!])+|,?\\!\s*|\\,\s*|,?~)(?=[0-9]{3}(?![0-9]))",
        "",
    ),
    (r"(?<=[0-9]),\s*\\[;: ]\s*(?=[0-9])", ", "),
    # The thousands of Switzerland and of code: 1'234'567, 1_234_567.
    (r"(?<![\w.'])[1-9][0-9]{0,2}(?:(?:'[0-9]{3}){2,}|(?:\\?_[0-9]{3})+)(?![\w.'])", _join_digits),
    # 1, 234, 000 is one number, for no list has the part 000.
    (r"(?<![0-9.,])(?<![0-9] )[1-9][0-9]{0,2}(?:, ?[0-9]{3})*, 000(?!,? ?[0-9])", _join_digits),
    # Values side by side are a list.
    (r"(?<=[0-9])\s*\\q?quad(?![A-Za-z])\s*(?=[-+]?[0-9])", ", "),
    # The end of a proof, the number of an equation; equations on lines of their own.
    (r"\s*(?:\\q?quad\s*)?\\(?:blacksquare|square|qed|Box|QED)(?![A-Za-z])\s*$", ""),
    (r"\\(?:tag\*?|label)\s*\{[^{}]*\}|\\(?:nonumber|notag)(?![A-Za-z])", " "),
    (
        r"\\begin\s*\{(?P<name>(?:align|aligned|equation|gather|gathered|multline|split)\*?)\}"
        r"(?P<lines>.*?)\\end\s*\{(?P=name)\}",
        _open_alignment,
    ),
    # Sizing, layout and the delimiters \( \) \[ \] go, and so do phrases around an answer.
    (rf"\\{_LAYOUT}(?![A-Za-z])\.?|(?<!\\)\\[()\[\]]", " "),
    (r"\\(?:therefore|because)(?![A-Za-z])|(?i:\.? ?I hope (?:it|this) is correct\.?)\s*$", " "),
    # Code: np.sqrt(2), Matrix([[1, 2]]), oo.
    (r"(?<![A-Za-z\\])(?:np|numpy|math|sp|sympy)\.(?=[A-Za-z])", ""),
    (r"^(?:Matrix|array)\((\[.*\])\)$", r"\1"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r" \\pi "),
    (r"(?:the )?square root of ([0-9]+)", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z\\])(?:oo|[Ii]nf(?:inity)?)(?![A-Za-z])", r" \\infty "),
    # Space commands; ~ at the beginning means "about".
    (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}", " "),
    (r"^\s*~(?=[^~]*$)", "≈"),
    # Sets of numbers.
    (rf"\\{_BLACKBOARD}\s*\{{?R\}}?(?![a-z])", "ℝ"),
    (rf"\\{_BLACKBOARD}\s*\{{?Z\}}?(?![a-z])", "ℤ"),
    (rf"\\{_BLACKBOARD}\s*\{{?N\}}?(?![a-z])", "ℕ"),
    (rf"\\{_BLACKBOARD}\s*\{{?Q\}}?(?![a-z])", "ℚ"),
    (rf"\\{_BLACKBOARD}\s*\{{?C\}}?(?![a-z])", "ℂ"),
    # The unit vectors i, j, k; then the text of the other text commands.
    (rf"\\{_VECTOR}\s*\{{? ?\\?([ijk])(?:math)? ?\}}?(?![A-Za-z(])", r" \\\1hat "),
    (rf"\\{_WRAPPERS}\s*{_BRACED}", r" \1 "),
    # Once more, for one in another.
    (rf"\\{_WRAPPERS}\s*{_BRACED}", r" \1 "),
    (r"\\(?:textcolor|color|colorbox)\{[a-z]+\}|\\[hv]?phantom\{[^{}]{0,2}\}", " "),
    # Logical signs are words.
    (r"\\(?:arc)?(?:land|wedge)(?![A-Za-z])", " and "),
    (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
    # Every form of a fraction and of a binomial coefficient.
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:measured|spherical)angle(?![A-Za-z])", r"\\angle"),
    (r"(?<=\S)\s*(?:\\(?:Rightarrow|Longrightarrow|implies)(?![A-Za-z])|⇒)\s*", ", so "),
    (r"\\binom\s*([0-9])\s*([0-9])(?![0-9])", r"\\binom{\1}{\2}"),
    (r"(?<![\w.])([0-9]{1,4}) choose ([0-9]{1,4})(?!\w)", r"\\binom{\1}{\2}"),
    # A command of one letter that stands without braces: \vec a, \bar z.
    (r"\\(vec|overrightarrow|mathbf|boldsymbol|bm|hat)\s+([a-hl-zA-Z])(?![A-Za-z])", r" \2 "),
    (
        r"\\(?:bar|overline)(?:\s+([A-Za-z])(?![A-Za-z])|\s*\{\s*([A-Za-z])\s*\})",
        r"\\overline{\1\2}",
    ),
    (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\])C\(([0-9]+), ?([0-9]+)\)", r"\\binom{\1}{\2}"),
    # {}_5C_2, ^5C_2, C_5^2 and 5C2 choose 2 of 5, and those with a P, or A_5^2, arrange them.
    (
        r"(?:\{\s*\}\s*|(?<![\w)}\]]))[_^]"
        + _INDEX.format("number")
        + r"(?P<letter>[CPℂ])\s*_"
        + _INDEX.format("chosen").removesuffix(r"\s*"),
        _choose,
    ),
    (
        r"(?<![\w\\^}])(?P<letter>[CAPℂ])\s*_\{?(?P<number>[0-9]{1,4})\}?\s*\^\{?(?P<chosen>[0-9]{1,4})\}?",
        _choose,
    ),
    (
        r"(?<![\w\\^}])(?P<letter>[CAPℂ])\s*\^\{?(?P<chosen>[0-9]{1,4})\}?\s*_\{?(?P<number>[0-9]{1,4})\}?",
        _choose,
    ),
    (r"(?<![\w.])(?P<number>[0-9]{1,4})(?P<letter>[CP])(?P<chosen>[0-9]{1,4})(?!\w)", _choose),
    (
        r"(?<![A-Za-z])\\?(gcd|lcm|max|min|GCD|LCM|HCF|hcf)\s*\\?[({[]([^][(){}\\]{1,80})\\?[])}]",
        _nested_calls,
    ),
    # 0.1(6) repeats the 6.
    (r"(?<![\w.])([0-9]*\.[0-9]*)\(([0-9]{1,20})\)", r"\1\\overline{\2}"),
    (r"(?<=[0-9])\s*:\s*(?=[0-9])", ":"),
    # +∞ is ∞, and - ∞ is -∞.
    (r"(?<=[(\[,])\s*\+\s*(?=\\infty)|^\+\s*(?=\\infty)", " "),
    (r"-\s+(?=\\infty)", "-"),
    # Commands with a sign, and signs in ASCII.
    (r"\\([A-Za-z]+)", _write_sign),
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degrees?(?![A-Za-z])", r" \\degree "),
    # 1.5 x 10^3, 2 x 3 = 6, 10 x $4 = $40
    (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", "*"),
    (r"(?<=[0-9])\s+[xX]\s+(?=\\?\$?[0-9.]+\s*(?:[=*]|[xX]\s))", "*"),
    (r"(?<=[0-9]) ?\^ ?\{? ?(st|nd|rd|th) ?\}?", r"\1"),
    (r"(?<=[0-9])-(?=(?:st|nd|rd|th)(?![A-Za-z]))", ""),
    (r"<=|=<", "≤"),
    (r">=|=>", "≥"),
    (r"(?<=[ a-z])!=", "≠"),
    (r"\+/-|\+-(?=[0-9\\ ])", "±"),
    # 1 234 567, but not the 2 256 of \log_2 256
    (r"(?<![0-9_^])(?<![0-9][ ,])([1-9][0-9]{0,2}(?: [0-9]{3})+)(?![ ,]?[0-9]| ?/)", _join_digits),
    # k ∈ Z, and the clause in brackets: kπ (k ∈ ℤ).
    (r"∈\s*Z(?![A-Za-z(])", "∈ ℤ"),
    (r"∈\s*N(?![A-Za-z(])", "∈ ℕ"),
    (r"[ ,]*\(\s*([a-z]\s*∈\s*[ℤℕ])\s*\)\s*(?=$|\$)", r", \1"),
    # Escaped signs; $ in pairs delimits maths, and a single one is currency.
    (r"\\([%{}#&])", r"\1"),
    (r"^\{\s*(.*\S)\s*[|:]\s*([a-z]\s*∈\s*[ℤℕ])\s*\}$", r"\1, \2"),
    (
        r",\s*(?:where |for |with )?([a-z])\s*=\s*0\s*,\s*±\s*1\s*,\s*(?:±\s*2\s*,\s*)?\.\.\.\s*$",
        r", \1 ∈ ℤ",
    ),
    (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),
    (r"\\\$", "$"),
    # $70k, $1.2M, a $5 note, $3 and 50 cents.
    (r"(?<=[$£€¥])( ?[0-9][0-9,.]*) ?([kKmMbB]|bn|mn)(?!\w)", _write_scale),
    (r"^an? (?=[$£€¥] ?[0-9])", ""),
    (r"\$([0-9]+) and ([0-9]{1,2}) cents?(?!\w)", r"\1 dollars and \2 cents"),
    (r"[~\s]+", " "),
    # A U between brackets is a union; ]1, 2[ is an open interval; <1, 2> is a vector.
    (r"(?<=[)\]}]) ?U ?(?=[(\[{])", "∪"),
    (r"^ ?\]([^()\[\]]*,[^()\[\]]*[\[\])]) ?$", r"(\1"),
    (r"^ ?([\[(][^()\[\]]*,[^()\[\]]*)\[ ?$", r"\1)"),
    (r"^ ?<([^<>]*,[^<>]*)> ?$", r"⟨\1⟩"),
    # Words before the answer, quotes around it, and the full stop after it, unless that belongs to
    # an ellipsis.
    (_LEAD, ""),
    (r"""^ ?(["`'])(.*)\1 ?$""", r"\2"),
    (r"(?<![.])[.]$", ""),
    (r"(?i)^(?:in )?(?:the year )?(?=[12][0-9]{3}$)", ""),
    # Yes, it is; no, they do not.
    (rf"(?i)^(yes), {_SUBJECT} {_AUXILIARY}$|^(no), {_SUBJECT} {_AUXILIARY}(?:n't| not)$", r"\1\2"),
    # Remarks after a comma: "72, in total", "72, which is the number of clips".
    (rf"(?<=[\w)}}\]%]) ?, ?(?:{_REMARKS})$", ""),
    (r"^(?:exactly|precisely|only|just) (?=[-0-9$\\(])", ""),
    (r"(?<=[\w)}\]%]), (?:because|since|as) [a-z' ]{1,60}$", _without_remark),
    # 12 times as many, 12 more apples
    (rf"(?<=[0-9]) times(?: as {_COMPARED}\b[a-z ]*)?$", ""),
    (r"(?<=[0-9]) more (?!.*\bthan\b)(?!and\b)(?=[a-z]{3,})", " "),
    (rf"(?<=[\w)}}\]%]), which (?:is|are) {_POSSESSIVE} [a-z' ]{{1,60}}$", _without_remark),
]

REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]
