"""Numbers too large to be written out, compared by their residues modulo random primes.

2^100000 + 1 and 1 + 4^50000 have 100,000 bits, but their residues modulo a prime of 127 bits take a
few multiplications. Two numbers with different residues differ for certain. Numbers with equal
residues modulo three primes, drawn at random by the pair of expressions, are equal but for a chance
below 2^-200: a difference of B bits has at most B / 126 such prime factors, and there are more than
2^119 primes (Schwartz 1980, J. ACM 27(4); Motwani and Raghavan 1995, "Randomized Algorithms",
section 7.4).
"""

import random
from collections.abc import Callable
from fractions import Fraction

from flint import fmpz

from alignment.rewards.grading.expressions import CONSTANTS, Node, Refused

PRIMES = 3
MAX_FACTORIAL = 100_000
MAX_FACTORIALS = 300_000  # the sum of all numbers whose factorials one comparison takes
_MERSENNE = 2**127 - 1


def equal_residues(a: Node, b: Node, whole: Callable[[Node], int]) -> bool | None:
    """Whether two rational trees are equal, at random values of their variables.

    None where they are not rational by their form, or take too much work.

    `whole` gives the exact value of a tree that is a whole number, an exponent or the operand of a
    factorial, and raises `Refused` for any other.
    """
    rng = random.Random(repr((a, b)))
    for k in range(PRIMES + 1):
        # A known prime comes first, so that none is drawn for trees that have no residues.
        prime = _random_prime(rng) if k else _MERSENNE
        residues = _Residues(prime, whole, rng)
        try:
            if residues.residue(a) != residues.residue(b):
                return False
        except Refused:
            return None
    return True


def _random_prime(rng: random.Random) -> int:
    while True:
        number = fmpz(rng.getrandbits(126) | 1 << 126 | 1)
        if number.is_probable_prime():
            return int(number)


class _Residues:
    """The residues of trees modulo one prime."""

    def __init__(self, prime: int, whole: Callable[[Node], int], rng: random.Random) -> None:
        self.prime = prime
        self.whole = whole
        self.rng = rng
        self.values: dict[str, int] = {}  # of variables
        self.factorials = 0  # the sum of the numbers whose factorials were taken

    def residue(self, node: Node) -> int:
        """The residue of a tree. Raises `Refused` where it has none."""
        if isinstance(node, Fraction):
            return self.divide(node.numerator, node.denominator)
        if isinstance(node, str):
            return self.variable(node)
        match node:
            case ("+", a, b):
                return (self.residue(a) + self.residue(b)) % self.prime
            case ("-", a, b):
                return (self.residue(a) - self.residue(b)) % self.prime
            case ("*", a, b):
                return self.residue(a) * self.residue(b) % self.prime
            case ("/", a, b):
                return self.divide(self.residue(a), self.residue(b))
            case ("^", base, exponent):
                return self.power(self.residue(base), self.whole(exponent))
            case ("!", operand):
                return self.factorial(self.whole(operand))
            case ("binom", n, k):
                total, chosen = self.whole(n), self.whole(k)
                if chosen > total:
                    raise Refused("undefined")
                below = self.factorial(chosen) * self.factorial(total - chosen)
                return self.divide(self.factorial(total), below)
        raise Refused("no rational number by its form")

    def variable(self, name: str) -> int:
        if name in CONSTANTS:
            raise Refused("no rational number")
        if name not in self.values:
            self.values[name] = self.rng.randrange(1, self.prime)
        return self.values[name]

    def divide(self, top: int, bottom: int) -> int:
        # A random prime divides no number by accident, so the number is zero.
        if bottom % self.prime == 0:
            raise Refused("a division by zero")
        return top * pow(bottom, -1, self.prime) % self.prime

    def power(self, base: int, exponent: int) -> int:
        if base == 0:
            if exponent <= 0:
                raise Refused("undefined")
            return 0
        # By Fermat's theorem the power repeats after prime - 1 exponents.
        return pow(base, exponent % (self.prime - 1), self.prime)

    def factorial(self, number: int) -> int:
        self.factorials += max(0, number)
        if not 0 <= number <= MAX_FACTORIAL or self.factorials > MAX_FACTORIALS:
            raise Refused("too large a factorial, or undefined")
        return int(fmpz.fac_ui(number) % self.prime)  # pyright: ignore[reportArgumentType]
