"""The Dockerfile as its stages and their instructions."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).resolve().parents[2] / "Dockerfile"


class Instruction(NamedTuple):
    """`RUN pip install …`: word and value."""

    word: str
    value: str


@dataclass
class Stage:
    """FROM base AS name, and what follows."""

    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [instruction.value for instruction in self.instructions if instruction.word == word]


@dataclass
class Dockerfile:
    """Its stages by name, in their order."""

    stages: dict[str, Stage]

    @classmethod
    def read(cls) -> Dockerfile:
        text = re.sub(r"^#.*\n", "", PATH.read_text(), flags=re.MULTILINE)
        stages: dict[str, Stage] = {}
        stage = Stage("")
        for line in text.replace("\\\n", "").splitlines():
            word, _, value = line.strip().partition(" ")
            if word == "FROM":
                base, _, name = value.partition(" AS ")
                stage = stages[name] = Stage(base)
            elif word:
                stage.instructions.append(Instruction(word, value.strip()))
        return cls(stages)

    def lineage(self, name: str) -> list[Stage]:
        """Return the stage after all stages on which it is built."""
        stage = self.stages[name]
        return [*(self.lineage(stage.base) if stage.base in self.stages else []), stage]

    def whole(self, name: str) -> Stage:
        """Return the stage merged with all stages on which it is built."""
        lineage = self.lineage(name)
        return Stage(lineage[0].base, [instruction for stage in lineage for instruction in stage.instructions])

    def environment(self, name: str) -> dict[str, str]:
        pairs = (pair.partition("=") for value in self.whole(name).of("ENV") for pair in shlex.split(value))
        return {key: value for key, _, value in pairs}
