"""Context parallelism: exact attention over torch.distributed, for every mask."""

from typing import NoReturn

from ..missing import raise_missing
from .choose import MethodExplanation as MethodExplanation
from .context_parallel_attention import context_attention as context_attention
from .context_parallel_attention import explain_context as explain_context
from .decode import decode_attention as decode_attention
from .plan import ContextPlan as ContextPlan
from .shard import roll as roll
from .shard import shard as shard
from .shard import unshard as unshard


def __getattr__(name: str) -> NoReturn:
    raise_missing(__name__, name)
