"""Whose code the models learn: a pinned list of packages under permissive licences, their wheels, the licence check.

`packages.tsv` beside this file is the list: name, version, licence as the wheel's metadata states it, and whether the
package is learnt or held out. Only wheels are fetched, so that no package's code runs.
"""

from __future__ import annotations

import csv
import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("packages.tsv")
#: SPDX identifiers that allow use, change and distribution, and ask for the notice to be kept.
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "PSF-2.0",
    "Python-2.0",
}
#: Trove classifiers and free texts that say the same. "BSD License" leaves open which of them.
SPELLINGS = {
    "apache 2": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license (apache 2.0)": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "the mit license": "MIT",
    "python software foundation license": "PSF-2.0",
} | {licence.lower(): licence for licence in PERMISSIVE}


@dataclass(frozen=True)
class Package:
    """One line of the list."""

    name: str
    version: str
    licence: str
    is_held_out: bool


def read_packages(path: Path = LIST) -> list[Package]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return [Package(row["name"], row["version"], row["licence"], row["use"] == "held-out") for row in rows]


def download(packages: Iterable[Package], directory: Path) -> None:
    """Fetches the wheels that `directory` lacks from the package index that pip is set up for."""
    directory.mkdir(parents=True, exist_ok=True)
    missing = [f"{package.name}=={package.version}" for package in packages if not find_wheels(directory, package)]
    if missing:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        subprocess.run([*pip, "--quiet", "--dest", str(directory), *missing], check=True)


def find_wheels(directory: Path, package: Package) -> list[Path]:
    """The wheel of this name and version, or nothing."""
    name = re.sub(r"[-_.]+", "_", package.name).lower()
    return [
        path
        for path in sorted(directory.glob("*.whl"))
        if re.sub(r"[-_.]+", "_", path.name.split("-")[0]).lower() == name
        and path.name.split("-")[1] == package.version
    ]


def open_wheel(directory: Path, package: Package) -> zipfile.ZipFile:
    """Raises FileNotFoundError where the wheel is missing, ValueError where its licence is not the list's or not
    permissive."""
    found = find_wheels(directory, package)
    if not found:
        raise FileNotFoundError(f"no wheel of {package.name}=={package.version} in {directory}")
    wheel = zipfile.ZipFile(found[0])
    licence = licence_of(wheel)
    if licence != package.licence or not is_permissive(licence):
        raise ValueError(f"{package.name}=={package.version} states {licence!r}; the list says {package.licence!r}")
    return wheel


def licence_of(wheel: zipfile.ZipFile) -> str:
    """An SPDX expression from the wheel's metadata; what it states unchanged, where that is none that is known."""
    name = next(name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
    metadata = email.message_from_bytes(wheel.read(name))
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"]).strip()
    classifiers = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License")]
    stated = [line for line in classifiers if line != "OSI Approved"] or [str(metadata["License"] or "")]
    return " AND ".join(sorted({SPELLINGS.get(text.strip().lower(), text.strip()[:60]) for text in stated}))


def is_permissive(expression: str) -> bool:
    """Each part joined by AND offers, among those joined by OR, a permissive licence."""
    parts = re.sub(r"[()]", " ", expression).split(" AND ")
    return all(PERMISSIVE.intersection(map(str.strip, part.split(" OR "))) for part in parts)
