"""Context parallelism for models of transformers.

Layers attend to the tokens of all ranks. Positions, packed sequences and labels are translated for
a rank's tokens. Models that mix tokens in another way or compute their own positions are refused.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...parallel import ContextPlan, roll, shard
from ...parallel.ranks import Mesh, Ranks, agree, count_targets, gather_sequence
from ...tracing import uncompiled
from . import hf_attention, packing
from .models import unserved

_SERVED_KINDS = {"full_attention", "sliding_attention"}
# Model arguments with tokens in dim 1.
_OF_TOKENS = ("input_ids", "inputs_embeds", "labels", "shift_labels", "token_type_ids")
_REFUSED = {
    "past_key_values": "a sequence sharded over ranks has no cache",
    "cache": "a sequence sharded over ranks has no cache",
    "use_cache": "a sequence sharded over ranks has no cache",
    "cu_seq_lens_q": "position_ids that start anew separate packed sequences",
    "cu_seq_lens_k": "position_ids that start anew separate packed sequences",
    "output_attentions": "the weights of a rank's queries are not computed",
}


class SpreadModels:
    """Patches for models of transformers with attn_implementation="fastattn".

    attention: `fastattn.attention` from this rank's tokens to all ranks'.
    """

    def __init__(self, mesh: Mesh, plan: ContextPlan, attention: Callable[..., Any]) -> None:
        self.mesh, self.plan, self._attention = mesh, plan, attention
        self._checked: WeakSet[nn.Module] = WeakSet()
        # For each model being called: whether it has the positions of its tokens.
        self._calls: list[tuple[str, bool]] = []
        self._told = "transformers.modeling_utils" in sys.modules

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Owner, name and new value of each patched attribute."""
        yield hf_attention, "attention", self.attention
        yield packing, "restarts", self._packed(packing.restarts)
        for name, reason in (
            ("attention_varlen", f"cu_seq_lens_q: {_REFUSED['cu_seq_lens_q']}"),
            ("attention_weights", f"output_attentions: {_REFUSED['output_attentions']}"),
            ("decode_attention", "one token per rank looks like a step of decoding"),
        ):
            refusal = f"not supported under ContextParallel: {reason}"
            yield hf_attention, name, partial(_refuse, refusal)
        if self._told:
            from transformers import (
                AttentionInterface,
                AttentionMaskInterface,
                PreTrainedModel,
                masking_utils,
            )

            find = masking_utils.find_packed_sequence_indices
            yield masking_utils, "find_packed_sequence_indices", self._packed(find)
            yield PreTrainedModel, "__call__", self._call(PreTrainedModel.__call__)
            yield PreTrainedModel, "loss_function", self._shared(PreTrainedModel.loss_function)
            # Outside of compiled graphs, which hold no rules of masks and no messages.
            read = self._called(masking_utils._preprocess_mask_arguments)
            yield masking_utils, "_preprocess_mask_arguments", uncompiled(read)
            for registered in (AttentionInterface, AttentionMaskInterface):
                by_name = registered._global_mapping
                outside = {hf_attention.NAME: uncompiled(by_name[hf_attention.NAME])}
                yield registered, "_global_mapping", {**by_name, **outside}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Attention of a layer, with its mask as options."""
        if not self._told:
            raise RuntimeError(
                "transformers was imported while ContextParallel was active: import it before"
            )
        name, placed = self._calls[-1] if self._calls else ("", True)
        if not placed:
            raise ValueError(
                f"position_ids must be given to {name} under ContextParallel, as it counts them: "
                "shard(position_ids, 1, plan, mesh)"
            )
        if options.pop("query_offset", 0):
            raise ValueError("query_offset: a sequence sharded over ranks has no cache")
        local = (self.plan.length, self.plan.length)
        for mask in ("attn_mask", "attn_bias"):
            if mask in options and options[mask].shape[-2:] == local and self.plan.ranks > 1:
                raise ValueError(
                    "attention_mask was made of this rank's tokens alone, by a function that is "
                    f"not transformers' own: give the model [B, 1, {local[0]}, {self.plan.T}], "
                    "shard(mask of the whole sequence, 2, plan, mesh)"
                )
        return self._attention(q, k, v, **options)

    def _packed(self, find: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        """Wrap a function that numbers packed sequences, to see whole rows."""

        def whole(x: Tensor | None) -> Tensor | None:
            return None if x is None else gather_sequence(x, 1, self.plan, Ranks.of(self.mesh))

        @wraps(find)
        def call(*rows: Tensor | None) -> Tensor | None:
            positions = find(*map(whole, rows))
            return None if positions is None else shard(positions, 1, self.plan, self.mesh)

        return call

    def _call(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's `__call__` for a rank's tokens."""

        @wraps(inner)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            bound = self._bound(model, args, kwargs)
            placed = bound.arguments.get("position_ids") is not None
            self._calls.append((type(model).__name__, placed))
            try:
                return inner(model, **_passed(bound))
            finally:
                self._calls.pop()

        return call

    @torch.compiler.disable
    def _bound(self, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
        """Arguments of a model's forward, checked and placed on every rank."""
        bound, error = inspect.signature(model.forward).bind_partial(*args, **kwargs), None
        try:
            self._place(model, bound)
        except ValueError as problem:
            error = problem
        if not self._calls:
            agree(Ranks.of(self.mesh), _signature(model, bound), error)
        elif error is not None:
            raise error
        return bound

    def _place(self, model: Any, bound: inspect.BoundArguments) -> None:
        """Check a call, and add positions for a model that counts them from 0."""
        if model not in self._checked:
            check_model(model, self.plan.T)
            self._checked.add(model)
        arguments, others = bound.arguments, _others(bound)
        for name, reason in _REFUSED.items():
            x = arguments.get(name, others.get(name))
            if x is not None and x is not False:
                raise ValueError(f"{name} is not supported under ContextParallel: {reason}")
        if "use_cache" in bound.signature.parameters:
            arguments["use_cache"] = False
        tokens = None
        for name in _OF_TOKENS:
            x = arguments.get(name, others.get(name))
            if isinstance(x, Tensor):
                self._check_length(name, x, 1)
                tokens = x if tokens is None else tokens
        if isinstance(arguments.get("labels"), Tensor):
            _check_loss(model)
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._check_length("attention_mask", mask, 1)
        if isinstance(positions, Tensor):
            self._check_length("position_ids", positions, positions.dim() - 1)
        elif tokens is not None and positions is None and counts_positions(type(model).forward):
            if "position_ids" not in bound.signature.parameters:
                raise ValueError(
                    f"{type(model).__name__} is not supported under ContextParallel: it takes no "
                    "position_ids, and counts them from 0 on each rank"
                )
            own = self.plan.indices(Ranks.of(self.mesh).rank).clamp(max=self.plan.T - 1)
            arguments["position_ids"] = own[None].to(tokens.device)

    def _check_length(self, name: str, x: Tensor, dim: int) -> None:
        if x.dim() <= dim or x.shape[dim] != self.plan.length:
            raise ValueError(
                f"{name} must have {self.plan.length} tokens in dim {dim}, as a rank has by the "
                f"plan, got {list(x.shape)}: shard(x, {dim}, plan, mesh) does it"
            )

    def _called(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that a model's forward calls, to refuse a forward called by itself."""

        @wraps(read)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                raise ValueError(
                    "under ContextParallel call a model, not its forward, which counts positions "
                    "from 0 on each rank"
                )
            return read(*args, **kwargs)

        return call

    def _shared(self, loss: property) -> property:
        """Wrap `loss_function` to compute this rank's share of the whole sequence's loss.

        A token's label may be on another rank, and the mean is over all ranks.
        """

        def get(model: Any) -> Callable[..., Any]:
            assert loss.fget is not None
            inner = loss.fget(model)

            @wraps(inner)
            def share(*args: Any, **kwargs: Any) -> Any:
                _check_loss(model)
                arguments = inspect.signature(inner).bind(*args, **kwargs).arguments
                others = arguments.pop("kwargs", {})
                if arguments.get("shift_labels") is None:
                    arguments["shift_labels"] = roll(arguments["labels"], 1, self.plan, self.mesh)
                if arguments.get("num_items_in_batch") is None:
                    ranks = Ranks.of(self.mesh)
                    arguments["num_items_in_batch"] = count_targets(
                        arguments["shift_labels"], ranks
                    )
                return inner(**arguments, **others)

            return uncompiled(share)

        return property(get, loss.fset)


def check_model(model: Any, T: int) -> None:
    """Raise on a model that mixes T tokens in another way than our attention."""
    name, config = type(model).__name__, model.config
    chosen = config._attn_implementation
    if chosen != hf_attention.NAME:
        raise ValueError(
            f"under ContextParallel models of transformers need attn_implementation="
            f'"{hf_attention.NAME}", got {chosen!r} for {name}'
        )
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is not supported under ContextParallel: it has two sequences")
    kinds = set(getattr(config, "layer_types", None) or ()) - _SERVED_KINDS
    convolutions = (x for x in model.modules() if isinstance(x, nn.Conv1d))
    convolved = [x for x in convolutions if x.kernel_size != (1,)]
    if model._is_stateful or kinds or convolved:
        causes = sorted(kinds) or [type(x).__name__ for x in convolved[:1]] or ["a state"]
        raise ValueError(
            f"{name} is not supported under ContextParallel: it has {causes[0]}, which sees the "
            "tokens of one rank"
        )
    for part, reason in unserved(model, hf_attention.NAME)[1].items():
        raise ValueError(f"{name} is not supported under ContextParallel: {part or name}: {reason}")
    for part in model.modules():
        longest = _frequencies_hold_until(part)
        if longest is not None and longest < T:
            raise ValueError(
                f"{name} is not supported under ContextParallel with {T} tokens: past {longest} "
                "its rotary frequencies depend on the last position, which differs between ranks"
            )


def _check_loss(model: Any) -> None:
    """Raise on a loss other than the mean over next tokens."""
    name, code = type(model).__name__, inspect.unwrap(type(model).forward).__code__
    # Other forwards compute a loss themselves, without shift_labels and num_items_in_batch.
    by_mapping = "loss_function" in code.co_names and code.co_flags & inspect.CO_VARKEYWORDS
    if model.loss_type != "ForCausalLM" or hasattr(model, "_loss_function") or not by_mapping:
        raise ValueError(
            f"labels are not supported under ContextParallel for {name}, which has its own "
            "loss: leave them out, and compute it from the logits of a rank's tokens"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"output_router_logits of {name} is not supported under ContextParallel: its loss is "
            "no sum over tokens"
        )


def _frequencies_hold_until(module: nn.Module) -> int | None:
    """Number of positions up to which a rotary module's frequencies are constant; None: any."""
    kinds = getattr(module, "rope_type", None)
    named = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    if not any(kind == "longrope" or "dynamic" in kind for kind in named if kind):
        return None
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    nested = [x for x in parameters.values() if isinstance(x, dict)]
    key = "original_max_position_embeddings"
    bounds = [x[key] for x in (parameters, *nested) if x.get(key)]
    return min(bounds, default=getattr(module, "original_max_seq_len", 0))


def _others(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Extra keyword arguments of a call, as a mutable dict."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            others: dict[str, Any] = bound.arguments.setdefault(name, {})
            return others
    return {}


def _passed(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments of a call by name."""
    others = _others(bound)
    named = {name: x for name, x in bound.arguments.items() if x is not others}
    return named | others


def _signature(model: Any, bound: inspect.BoundArguments) -> tuple[Any, ...]:
    arguments = _passed(bound).items()
    shapes = ((name, tuple(x.shape)) for name, x in arguments if isinstance(x, Tensor))
    return (type(model).__name__, *sorted(shapes))


def _refuse(message: str, *_: Any, **__: Any) -> Any:
    raise ValueError(message)


@cache
def counts_positions(forward: Callable[..., Any]) -> bool:
    """Whether a model's forward counts missing positions from 0.

    Other models compute them from token ids or the mask, or pass the argument on.
    """
    try:
        text = inspect.getsource(inspect.unwrap(forward))
    except OSError:
        return False
    return "position_ids = torch.arange(" in text
