"""llmq-nb: pre-train and fine-tune language models on the GPUs that one person owns.

    from llmq_nb import Trainer, load_config

Importing this package imports nothing heavy: the names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmq_nb.config_file import load_config
    from llmq_nb.train.trainer import Trainer

__all__ = ["Trainer", "load_config"]
_HOMES = {"Trainer": "llmq_nb.train.trainer", "load_config": "llmq_nb.config_file"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
