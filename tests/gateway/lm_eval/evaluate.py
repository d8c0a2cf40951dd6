"""Evaluate the tasks of this directory with lm-evaluation-harness, and print each request's result as a line of JSON.

    python evaluate.py MODEL MODEL_ARGS [chat] TASK...

Runs in an environment that has lm_eval, with this directory as the working directory.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main(model: str, model_args: str, tasks: list[str]) -> None:
    if importlib.util.find_spec("lm_eval_photon"):
        import lm_eval_photon  # noqa: F401
    is_chat = tasks[0] == "chat"
    found = simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=tasks[is_chat:],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        apply_chat_template=is_chat,
        bootstrap_iters=0,
    )
    for task, samples in found["samples"].items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            result: Any = sample["resps"]
            print(json.dumps({"task": task, "item": sample["doc_id"], "result": result}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
