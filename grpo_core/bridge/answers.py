r"""The verifier for word problems: find the final answer in what a language model wrote, and compare it as an exact number.

Finding comes first: behind the last `####` or in the last `\boxed{…}`; else behind the last "the answer is"; else the last
number of the text. Reading follows a small grammar. What it cannot read for certain is not paid. Left out: numbers in words,
European decimals (1.234,56), rounding (0.333 is not 1/3), and conversions (72 % is 72, not 0.72; 6 dozen is 6).
"""

import logging
import re
import unicodedata
from fractions import Fraction

LONGEST_TEXT, LONGEST_SPAN, LONGEST_EXPRESSION = 20_000, 500, 60  # In characters; the end of a text is what counts.
TIME_LIMIT = 2  # Seconds for an expression.

CHARACTERS = {0xFF00 + i: chr(0x20 + i) for i in range(1, 95)}  # Full-width forms.
CHARACTERS |= str.maketrans("−–‐‑‒﹣٬٫’⁄∕\u00a0\u2007\u2009\u202f\u3000", "------,.'//     ")
CHARACTERS |= dict.fromkeys(map(ord, "\u200b\u200e\u200f\u2060\u00ad\ufeff\r"))  # Invisible: they go.
CHARACTERS |= {ord(c): " " + unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}

MONEY = r"(?:[$€£¥₹]|\b(?:USD|EUR|GBP|Rs\.?)(?=\s?[-\d.]))"
DOUBT = r"(?i:or|maybe|perhaps|possibly|alternatively|but (?:it )?(?:could|might|may))\b"
LATEX = r"(?:text|math|bold|display|left|right|q?quad|color|underline)[a-z]*|approx|mbox|[()\[\],;: \\]"  # It only decorates.
TIDY = [  # Applied in turn. Repetitions are bounded, or end where they cannot go on: the time is linear in the text.
    (r"<<[^<>\n]{0,200}>>|<\|[^<>|\n]{0,60}\|>", ""),  # GSM8K's calculator marks, special tokens.
    (r"(?m)^[ \t]*[-*•][ \t]+", ""),  # Bullets, which are no minus signs.
    (r"(?<![\d)*])(\*{1,3})(?![\s*])([^*\n]{1,200}?)\1(?!\d)", r" \2 "),  # Bold and italic, but not 2**3.
    (r"\\!", ""),
    (r"\{,\}", ","),
    (r"\\[dt]?frac\s{0,3}(?:\{(-?[\d.]{1,40})\}\s{0,3}\{([\d.]{1,40})\}|(\d)\s{0,3}(\d))", r" \1\3/\2\4 "),
    (rf"\^\s{{0,3}}\{{?\\(?:circ|degree)\b\}}?|[°~]|\\(?:{LATEX})", " "),
    (r"\\(?=[%$&#_])", ""),
    (r"(?<=[^\W\d_])\}?\s{0,3}\^\s{0,3}(?:\d|\{\d\})", ""),  # The exponent of a unit: m^2.
    (rf"(?<=[-+])\s?{MONEY}\s?", ""),  # -$5 is -5.
    (MONEY, " "),
    (r"(?i)\b(?:minus|negative)\s(?=[\d.])", "-"),
    (r"(?<=\d)\s{0,3}(?:\\times|\\cdot|[*·x])\s{0,3}(?=10\s{0,3}\^)|(?<=\d)\s{0,3}[xX]\s{0,3}(?=\d)", "×"),
    (r"(?<=\d)\s{0,3}×\s{0,3}10\s{0,3}\^\s{0,3}(?:\{(-?\d+)\}|(-?\d+))", r"e\1\2"),  # 1.5 × 10^3 is 1.5e3.
    (r"(?<![\d.,/])\d{1,3}(?:[ '_]\d{3})+(?![\d/])", lambda match: re.sub(r"\D", ",", match[0])),  # 1 234 is 1,234.
    (r"(?<=\d)\s{0,3}/\s{0,3}(?=\d)", "/"),
    (r"(?<=\d) and (?=\d+/\d)", " "),  # 5 and 1/2.
    (r"[ \t]{2,}", " "),
    (  # A remark behind a number: 72 (48 + 24); 72 clips, not 73; 72 dollars and 0 cents. But not a doubt: 72 (73), 72 (or 73).
        rf"(\d%?(?: (?!times|plus|minus)[^\W\d_]{{2}}[^\s\d()]{{0,20}}){{0,5}})(?: \((?!\W?{DOUBT})(?=[^()\n]*"
        r"(?:[^\W\d_]{2}|\d ?[-+*/×÷=]))[^()\n#\\]*\)?|(?:,|,? and) not [\d.,]*\d| and (?:0+|no|zero) cents)",
        r"\1 ",
    ),
]
TIDY = [(re.compile(pattern), replacement) for pattern, replacement in TIDY]

SCALES = {"hundred": 2, "thousand": 3, "k": 3, "million": 6, "m": 6, "billion": 9, "b": 9, "trillion": 12}
NUMBER = re.compile(  # All that hangs together, readable or not: 1,234.5 and 3 1/2, but also 1.2.3 and 5:30.
    r"(?P<sign>(?<![^\W_])(?<![.,^)])(?:(?<![\d)] )[-+]|(?<![\w)] )[-+] ))?(?<![^\W_])(?<![.^])"
    r"(?P<digits>(?:\d+ (?=\d+/\d))?\.?\d(?:[\d.,:/]*\d)?(?:[eE][-+]?\d+)?)"
    r"(?P<scale>\s?(?i:hundred|thousand|million|billion|trillion)\b|[kKMB]\b)?"
)
PLAIN = re.compile(r"(?:(?:(?!0)\d{1,3}(?:,\d{3}){1,12}|\d{1,40})(?:\.\d{1,40})?|\.\d{1,40})(?:[eE][-+]?\d\d?)?")
NOT_BEFORE = re.compile(  # What makes a number a part of something else, before it and behind it.
    r"(?i)(?:[\w)}]\s*[+/^×÷·]|[\d)}]\s*\*+|(?:[\d)}]|\b[a-z])\s*-|(?:^|\s)[<>≤≥]=?|√|\\[a-z]+\{?"
    r"|(?:\bno|not|n't)(?: be)?|\b(?:(?:more|less|fewer) than|at (?:least|most)|over|under))\s*\Z"
)
NOT_BEHIND = re.compile(
    r"\s*(?:[+^×÷·²³⁰¹⁴-⁹]|\*+\s*[\d(]|[/-]\s*[\d(]|and (?:a|one|two|three)\b)|\(\d|[xyz]\b"
    r"|(?:\s?% of|(?: \w{1,20})? (?:more|less|fewer) than) ?\d"
)
EXPRESSION = re.compile(r"\\|[+^*×÷·√]| [-/] ")

OPENING = r"[^\w.+\\-]{0,10}(?=(?:[-+] ?)?\.?\d)"  # Markup, then a number.
MARK = re.compile(r"#{4,}|\\(?:boxed|fbox)\s*\{?")
NOT_HEADING = re.compile(rf"{OPENING}(?!\d+[.)] +\S)|\s*\\")
NEIGHBOR = re.compile(
    r"(?:#{4,} ?([^\s#{}]{1,30})|\\(?:boxed|fbox)\s*\{([^{}\n]{1,60})\})[ ${}]*(?:[,;/&]|(?:or|and)(?: \w+)?)?[ ${}]*\Z"
    r"|(\S{1,30})\s+or\s*\Z"
)
SAID = re.compile(
    r"(?im)(?:\bans(?:wers?)?\b(?:(?!not |n't)[^\n.\d]){0,60}?(?:\b(?:is|are|be|equals)\b|[:=>])|^a:)[^\w.+\\-]{0,10}"
    rf"(?:(?:about|approximately|around|roughly|exactly|only|just|simply|equal to|a total of|either)\b)?{OPENING}(?!1[.)] +\S)"
)
CLAUSE_END = re.compile(  # A sentence's end, unless the next one takes it back, or a reason.
    rf"[.!?]\s(?! ?[-+*/^×=]| ?{DOUBT}| ?So\b)|\b(?:because|since|which|if|when|after|so)\b"
)
ENUMERATION = re.compile(r"(?:[,;]|\b(?:or|and))\s*\w*\s*\Z")
DOUBTFUL = {True: rf"\b{DOUBT}|\bSo\b", False: rf"\b(?!or\b){DOUBT}"}  # Behind a mark, or not.
EXPLAINING = set(re.findall(r"\w+", "of in per for from at by than with every each on as is was out not that"))


def is_right(completion: str, answer: str) -> bool:
    r"""Whether the final answer of `completion` is the number `answer`.

    Args:
        completion: any text.
        answer: the true final answer, such as "72" or "1,234", or a whole GSM8K solution that ends in "#### 72".

    >>> is_right("24 + 48 = 72\n#### 72", "72"), is_right(r"So \boxed{\$1,234.00}.", "1234"), is_right("#### 72 or 73", "72")
    (True, True, False)
    """
    value = final_answer(completion)
    return value is not None and value == final_answer(answer)


def final_answer(text: str) -> Fraction | None:
    r"""The final answer of a solution, as an exact number; None if there is none, it cannot be read, or there are several.

    >>> final_answer("The answer is 3 1/2 hours."), final_answer(r"\boxed{\frac{3}{4}}"), final_answer("no idea")
    (Fraction(7, 2), Fraction(3, 4), None)
    """
    text = tidy(text[-LONGEST_TEXT:])
    marked = marked_answer(text)
    if marked is not None:
        return read(marked)
    said = [match.end() for match in SAID.finditer(text)]
    clause = first_clause(text[said[-1] : said[-1] + LONGEST_SPAN].partition("\n")[0]) if said else "="
    if "=" in clause:  # "Answer: 48/2 = 24 in May. 24 + 48 = 72" opens a solution; it does not end one.
        return one_number(text, first=False)
    return one_number(clause, first=True)


def tidy(text: str) -> str:
    """The text with one spelling for each sign, and without what only decorates: currencies, markdown, LaTeX's fonts."""
    text = text.translate(CHARACTERS)
    for pattern, replacement in TIDY:
        text = pattern.sub(replacement, text)
    return text.rstrip("# \n")


def marked_answer(text: str) -> str | None:
    r"""What stands in the last \boxed{…} or behind the last ####, or None. Marks side by side are one answer: 72 or 73."""
    for mark in reversed(list(MARK.finditer(text))):
        rest = text[mark.end() : mark.end() + LONGEST_SPAN]
        span = rest.strip().partition("\n")[0]
        if mark[0].endswith("{"):
            span = rest[: closing_brace(rest)]
        elif mark[0].startswith("#") and span != rest.strip() and not NOT_HEADING.match(rest):
            continue  # A heading: "#### Step 3: add them up".
        if span.strip():
            neighbor = NEIGHBOR.search(text, max(mark.start() - 90, 0), mark.start())
            return f"{neighbor[neighbor.lastindex]} or {span}" if neighbor else span
    return None


def closing_brace(text: str) -> int:
    """Where the brace closes that was open before `text`; its end, if nowhere."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i
    return len(text)


def read(span: str) -> Fraction | None:
    """The one number that a marked answer states: of an equation its right side, of an expression its value."""
    *left, span = re.split(r"(?<![<>!])=(?!>)", first_clause(span))
    if len(left) > 1 and ENUMERATION.search(left[-1]):  # x = 72 or y = 73
        return None
    value = None if "\\" in span else one_number(re.sub(r"[\s{}]+", " ", span), first=True)
    return evaluate(span) if value is None and EXPRESSION.search(span) else value


def first_clause(text: str) -> str:
    """The first part that holds a digit, up to the end of its sentence or an explanation."""
    return next((part for part in CLAUSE_END.split(text) if re.search(r"\d", part)), "")


def one_number(text: str, first: bool) -> Fraction | None:
    """The first or the last number of a text, if it stands for itself: not in a longer expression, not beside a rival."""
    found = list(NUMBER.finditer(text))[slice(2) if first else slice(-2, None)]
    if not found:
        return None
    chosen = found[0 if first else -1]
    value = to_fraction(chosen)
    before = text[max(chosen.start() - 20, 0) : chosen.start()]
    if NOT_BEFORE.search(before) or NOT_BEHIND.match(text, chosen.end()):
        return None
    gap = text[found[0].end() : found[-1].start()]
    return None if {*map(to_fraction, found)} != {value} and are_rivals(gap, first) else value


def are_rivals(gap: str, marked: bool) -> bool:
    """Whether two numbers with `gap` between them are two answers: "72 or 73", "72, 73", "5 feet 3", but not "72 of 100"."""
    words = set(re.findall(r"[^\W\d_]+", gap.lower()))
    if re.search(DOUBTFUL[marked], gap):
        return True
    if re.search(r"[.!?]\s|[\n:=→]", gap) or words & EXPLAINING:
        return False
    return len(words - {"or", "and"}) <= 2 * marked + 2 * ("or" in words)


def to_fraction(number: re.Match) -> Fraction | None:
    """The value of a NUMBER, or None if it is none that everybody reads alike: 1.234,56, 12,34, 5:30, 1/0."""
    whole, _, rest = number["digits"].rpartition(" ")
    top, _, bottom = rest.partition("/")
    parts = whole or "0", top, bottom or "1"
    if not all(map(PLAIN.fullmatch, parts)):
        return None
    whole, top, bottom = (Fraction(part.replace(",", "")) for part in parts)
    if bottom == 0:
        return None
    scale = 10 ** SCALES.get((number["scale"] or "").strip().lower(), 0)
    return (whole + top / bottom) * scale * (-1 if (number["sign"] or "").startswith("-") else 1)


def evaluate(latex: str) -> Fraction | None:
    r"""The value of an expression such as 6^2 \cdot 2, by math-verify; None if that is not installed or finds no rational.

    Its time limit is an alarm, which only the main thread can set: elsewhere that raises, and expressions are not read.
    """
    if len(latex) > LONGEST_EXPRESSION:
        return None
    try:
        from math_verify.errors import TimeoutException
        from math_verify.utils import timeout
    except ImportError:
        return None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        return timeout(TIME_LIMIT)(_evaluate)(latex)
    except (Exception, TimeoutException):  # The parser may raise anything.
        return None


def _evaluate(latex: str) -> Fraction | None:
    from math_verify import LatexExtractionConfig, parse

    for sign, name in {"**": "^", "%": "", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "*": r"\cdot "}.items():
        latex = latex.replace(sign, name)
    (parsed,) = parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    decimal = parsed.evalf(30)  # Never as a whole number: 9^{9^9} has 369 million digits.
    if not (decimal.is_Float or decimal.is_Integer) or abs(decimal) > 10**15:
        return None
    exact = Fraction(str(decimal))
    simple = exact.limit_denominator(10**4)  # Further from each irrational number than what follows.
    return simple if abs(exact - simple) < Fraction(1, 10**12) else None
