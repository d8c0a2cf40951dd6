"""Regular expressions of numbers and times in a range, as JSON writes them."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_DIGIT = re.compile("[0-9]")


def same_length(least: str, most: str) -> str:
    """Return an expression of the texts from `least` to `most`, which differ in their digits only."""
    if not least:
        return ""
    first, last, n = least[0], most[0], least[1:]
    if first == last:
        return re.escape(first) + same_length(n, most[1:])
    zeros, nines, any_digits = _DIGIT.sub("0", n), _DIGIT.sub("9", n), _any_digits(n)
    if n == zeros and most[1:] == nines:
        return f"[{first}-{last}]{any_digits}"
    ways = [first + same_length(n, nines)]
    if int(last) - int(first) > 1:
        ways.append(f"[{int(first) + 1}-{int(last) - 1}]{any_digits}")
    ways.append(last + same_length(zeros, most[1:]))
    return f"({'|'.join(ways)})"


def integers(least: int, most: int) -> str:
    """Return an expression of the integers from `least` to `most`; "" if there are none."""
    if least > most:
        return ""
    if most < 0:
        return f"-({integers(-most, -least)})"
    if least < 0:
        return f"-({integers(1, -least)})|{integers(0, most)}"
    ways = []
    for num_digits in range(len(str(least)), len(str(most)) + 1):
        smallest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
        low, high = max(least, smallest), min(most, 10**num_digits - 1)
        ways.append(same_length(str(low), str(high)))
    return "|".join(ways)


def decimals(least: Decimal, most: Decimal, places: int, *, all_places: bool = False) -> str:
    """Return an expression of the decimals from `least` to `most`; "" if there are none.

    They have `places` digits after the point, fewer where every number of them is in the range (unless `all_places`),
    or no point.
    """
    if least < 0 < most:
        below = decimals(least, Decimal(0), places, all_places=all_places)
        above = decimals(Decimal(0), most, places, all_places=all_places)
        return "|".join(filter(None, [below, above]))
    if most <= 0 and least < 0:
        smallest = max(-most, Decimal(1).scaleb(-places))  # there is no -0
        positive = decimals(smallest, -least, places, all_places=all_places)
        return "|".join([*([f"-({positive})"] if positive else []), *(["0"] if most == 0 else [])])
    scale = 10**places
    low = int((least * scale).to_integral_value(ROUND_CEILING))
    high = int((most * scale).to_integral_value(ROUND_FLOOR))
    return _scaled(low, high, places, all_places) if low <= high else ""


def _scaled(low: int, high: int, places: int, all_places: bool) -> str:
    """Return an expression of the numbers from `low` to `high`, each divided by 10**places."""
    (first, begin), (last, end) = divmod(low, 10**places), divmod(high, 10**places)
    any_fraction = rf"(\.[0-9]{{{places if all_places else '1,' + str(places)}}})?"
    if first == last:
        return _whole(first, begin, end, places)
    ways = [_whole(first, begin, 10**places - 1, places)]
    if last - first > 1:
        ways.append(f"({integers(first + 1, last - 1)}){any_fraction}")
    ways.append(_whole(last, 0, end, places))
    return "|".join(ways)


def _whole(whole: int, begin: int, end: int, places: int) -> str:
    fraction = same_length(str(begin).zfill(places), str(end).zfill(places))
    return rf"{whole}(\.{fraction})" + ("?" if begin == 0 else "")


def _any_digits(text: str) -> str:
    return "".join(
        [f"[0-9]{{{len(run)}}}" if run[0].isdigit() else re.escape(run) for run in re.findall(r"\d+|\D", text)]
    )
