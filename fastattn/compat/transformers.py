"""Attention of Hugging Face transformers' models, by its registry of attention functions.

    fastattn.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fastattn")
    model.set_attn_implementation("fastattn")     # or a model that is there already

transformers makes the mask of a layer in one place and computes attention in another, and each
implementation registers a function for both. What the first returns is all that the second learns
of padding, windows and positions. Where its "sdpa" and "flash_attention_2" return None although a
mask is needed to tell one case from another, here a mask is returned; see `attention_mask`.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..decode import decode_attention, view_of_tensors
from ..functional import attention, attention_varlen
from ..statistics import attention_weights
from .lazy_mask import LazyMask, Rule
from .sdpa import bounded_bias

NAME = "fastattn"
# First and last minor version that the tests have run with.
_TESTED = ((5, 23), (5, 23))
_SMALL_CHANGES = "scores, masks or caches may be passed in another way there"


def register() -> None:
    """Make `attn_implementation="fastattn"` known to transformers.

    Raises:
        ImportError: transformers is not installed.
    Warns:
        UserWarning: once, for a version of transformers that was not tested.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "fastattn.compat.transformers needs the package transformers, which is not installed: "
            'pip install "fastattn[hf]"',
            name="transformers",
        ) from None
    _check_version(transformers.__version__)
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for each layer.

    Args:
        module: the layer. Its `is_causal` (default True) holds where the argument is None.
        query: [B, H_q, T_q, D].
        key: [B, H_k, T_k, D]; H_k divides H_q.
        value: [B, H_k, T_k, D_v].
        attention_mask: bool (True = attend) or float (added), broadcasting to [B, H_q, T_q, T_k];
            bool or integer [B, T_k] (nonzero = attend), the queries being the last tokens; or None.
        dropout: of the weights.
        scaling: factor on the products; default D ** -0.5.
        is_causal: without a mask, or with one of two dims: queries see no later keys.
        sliding_window: without a mask, or with one of two dims: how many keys around itself, itself
            included, a query sees on either side. Other masks have the window in them.
        softcap, s_aux, position_bias: `softcap`, `sinks` and `attn_bias` of `fastattn.attention`.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], offsets of sequences packed into a batch of
            one, where the mask is None or comes from `attention_mask` without padding.
        cache: refused: pages of transformers' continuous batching.
        output_attentions: also return the weights, without gradients or dropout.
        kwargs: what is meant for other implementations, and position_ids: the mask has them in it.

    Returns:
        ([B, T_q, H_q, D_v] contiguous, weights [B, H_q, T_q, T_k] or None).

    Raises:
        NotImplementedError: a paged cache.
        ValueError: no mask, although 1 < T_q != T_k and the layer is causal: where the queries
            stand among the keys is then unknown.
    """
    if cache is not None:
        raise NotImplementedError(
            "cache: fastattn does not serve the paged cache of transformers' continuous batching; "
            "fastattn.PagedKVCache and decode_attention do the same for models of one's own"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"dropout": dropout, "softcap": softcap, "sinks": s_aux}
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    options["scale"] = scaling
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    if position_bias is not None:
        options["attn_bias"] = bounded_bias(position_bias)
    mask, rule = attention_mask, None
    if isinstance(mask, LazyMask):
        rule = _usable_rule(mask, query, key)
        mask = mask.entries() if rule is None else None
    elif mask is None or mask.dim() == 2:
        rule = _rule_without_mask(mask, bool(causal), sliding_window, query, key)
        mask = None
    if cu_seq_lens_q is not None and rule is not None and rule.padding is None:
        packed = (cu_seq_lens_q, cu_seq_lens_k)
        return _packed(query, key, value, packed, rule, options, bool(output_attentions))
    if rule is not None:
        options.update(rule.options(key.shape[0]))
    if mask is not None:
        _add_mask(options, mask)
    options = {name: x for name, x in options.items() if x is not None}
    if not output_attentions and _is_one_step(query, key, value, options):
        return _one_step(query, key, value, options), None
    o = attention(query, key, value, **options).transpose(1, 2).contiguous()
    if not output_attentions:
        return o, None
    options.pop("dropout", None)
    return o, attention_weights(query, key, **options).to(query.dtype)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make the mask of layers of one kind, before it runs them.

    Returns None only where that cannot be mistaken: nothing is hidden, or queries and keys are the
    same tokens under a causal mask. In every other case, such as a chunk of a prompt behind a
    cache or a static cache with room to spare, it returns bool [B, 1, T_q, T_k], True = attend: a
    `LazyMask` where the rule behind mask_function is known and nothing traces the call, the
    entries themselves elsewhere.

    Args:
        batch_size, q_length, kv_length: B, T_q, T_k.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: says of (batch, head, query, key) positions whether the key is seen.
        attention_mask: bool [B, n], True = a token that exists, from position 0; or None.
        local_size: of a sliding window. mask_function has it.
        allow_is_causal_skip, allow_is_bidirectional_skip: None may be returned.
        use_vmap: mask_function can only be called with single numbers.
        device: of the result.
    """
    # Imported by a statement, which torch.compile can trace.
    from transformers import masking_utils as masking
    from transformers.utils.import_utils import is_tracing

    if mask_function is None:
        mask_function = masking.causal_mask_function

    def entries() -> Tensor:
        made: Tensor = masking.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return made

    aligned = not isinstance(q_offset, Tensor) and q_offset == kv_offset and q_length == kv_length
    if attention_mask is None:
        if mask_function is masking.causal_mask_function and allow_is_causal_skip and aligned:
            return None
        if mask_function is masking.bidirectional_mask_function and allow_is_bidirectional_skip:
            return None
    # One query has few entries, and generation hands those over a static cache to a compiled step.
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    one_step = q_length == 1 and (isinstance(q_offset, Tensor) or not skips)
    if one_step or use_vmap or is_tracing():
        return entries()
    rule = rule_of(mask_function)
    if rule is None or (rule.documents is not None and not aligned):
        return entries()
    padding = masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    rule = rule._replace(query_offset=q_offset - kv_offset, padding=padding)
    return LazyMask(rule, entries, (batch_size, 1, q_length, kv_length), device)


def rule_of(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule that one of transformers' own mask functions computes; None for any other function.

    A function is known by its code, and a closure by what it holds besides.
    """
    from transformers import masking_utils as masking

    if mask_function is masking.causal_mask_function:
        return Rule(causal=True)
    if mask_function is masking.bidirectional_mask_function:
        return Rule()
    maker = _makers().get(getattr(mask_function, "__code__", None))
    if maker is None:
        return None
    held = _held(mask_function)
    if maker == "and_masks":
        return _combined(held["mask_functions"])
    if maker == "packed_sequence_mask_function":
        return Rule(documents=held["packed_sequence_mask"])
    width = held["sliding_window"]
    if not isinstance(width, int) or width < 1:
        return None
    if maker == "sliding_window_overlay":
        return Rule(left=width - 1)
    return Rule(left=width, right=width)


def _combined(parts: Iterable[Callable[..., Any]]) -> Rule | None:
    """The rule of keys that all parts show."""
    from transformers import masking_utils as masking

    remapped = masking.remap_positions_for_packed_sequence(None, None).__code__
    whole = Rule()
    for part in parts:
        if getattr(part, "__code__", None) is remapped:
            # Positions rise by one inside a document, as places do: distances are the same. It
            # comes behind the documents that were found in the same positions.
            if whole.documents is None:
                return None
            part = _held(part)["mask_function"]
        rule = rule_of(part)
        if rule is None or (rule.documents is not None and whole.documents is not None):
            return None
        whole = Rule(
            causal=whole.causal or rule.causal,
            left=_least(whole.left, rule.left),
            right=_least(whole.right, rule.right),
            documents=rule.documents if whole.documents is None else whole.documents,
        )
    return whole


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _held(closure: Callable[..., Any]) -> dict[str, Any]:
    """What a closure keeps of its surroundings, by name."""
    cells = closure.__closure__ or ()
    names = closure.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


@cache
def _makers() -> dict[Any, str]:
    """Functions of transformers that make masks, by the code of what they make."""
    from transformers import masking_utils as masking

    made = {
        "and_masks": masking.and_masks(),
        "sliding_window_overlay": masking.sliding_window_overlay(1),
        "sliding_window_bidirectional_overlay": masking.sliding_window_bidirectional_overlay(1),
        "packed_sequence_mask_function": masking.packed_sequence_mask_function(None),
    }
    return {function.__code__: name for name, function in made.items()}


def _usable_rule(mask: LazyMask, query: Tensor, key: Tensor) -> Rule | None:
    """The rule of a mask that fits these tensors; None where its entries have to be read."""
    fits = tuple(mask.shape) == (key.shape[0], 1, query.shape[2], key.shape[2])
    return mask.rule() if fits else None


def _rule_without_mask(
    padding: Tensor | None, causal: bool, sliding_window: int | None, query: Tensor, key: Tensor
) -> Rule:
    """The rule of a layer whose mask is None or only says which keys exist."""
    T_q, T_k = query.shape[2], key.shape[2]
    if causal and padding is None and 1 < T_q != T_k:
        raise ValueError(
            f"attention_mask is None for {T_q} queries and {T_k} keys of a causal layer: where the "
            "queries stand is unknown. Masks of fastattn.compat.transformers.attention_mask tell"
        )
    side = None if sliding_window is None else sliding_window - 1
    if padding is not None:
        padding = padding.to(torch.bool)
    return Rule(causal, side, side, query_offset=T_k - T_q, padding=padding)


def _add_mask(options: dict[str, Any], mask: Tensor) -> None:
    """Add a mask's entries to the options, to a bias if there is one and they are numbers."""
    if mask.dtype == torch.bool:
        options["attn_mask"] = mask
    elif options.get("attn_bias") is None:
        options["attn_bias"] = bounded_bias(mask)
    else:
        options["attn_bias"] = bounded_bias(options["attn_bias"] + mask)


def _is_one_step(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether this is one new token of a row behind a cache that the decode kernels can read."""
    if query.shape[2] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    T_k = key.shape[2]
    offset = options.get("query_offset", T_k - 1)
    # There a query stands at the last key.
    if isinstance(offset, Tensor) or offset != T_k - 1 or T_k == 0:
        return False
    whole_rows = all(x.shape[3] * x.element_size() % 16 == 0 for x in (key, value))
    dense = key.is_contiguous() and value.is_contiguous() and key.data_ptr() % 16 == 0
    return dense and whole_rows and not options["dropout"] and "documents" not in options


def _one_step(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """[B, 1, H_q, D_v], the keys of a row split among many programs where there are few rows."""
    B, _, T_k, _ = key.shape
    wanted = {"causal": False, **options}
    for name in ("dropout", "query_offset"):
        wanted.pop(name, None)
    padding = wanted.pop("key_padding_mask", None)
    if padding is not None:
        wanted["attn_mask"] = padding[:, None, None]
    for name in ("attn_mask", "attn_bias"):
        if name in wanted:
            wanted[name] = wanted[name].expand(*wanted[name].shape[:-1], T_k)
    lengths = torch.full((B,), T_k, dtype=torch.int32, device=key.device)
    return decode_attention(query, view_of_tensors(key, value, lengths), **wanted).transpose(1, 2)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor | None],
    rule: Rule,
    options: dict[str, Any],
    output_attentions: bool,
) -> tuple[Tensor, None]:
    """Attention inside each of the sequences that lie behind one another in a batch of one."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of 1, got {query.shape[0]}")
    if output_attentions or options.get("attn_bias") is not None:
        raise NotImplementedError(
            "cu_seq_lens_q with a position_bias or output_attentions: leave the offsets out, and "
            "position_ids that start anew tell the sequences apart"
        )
    options["causal"] = rule.causal
    if rule.left is not None or rule.right is not None:
        options["window"] = (rule.left, rule.right)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    given = {name: x for name, x in options.items() if x is not None}
    return attention_varlen(q, k, v, *offsets, **given)[None].contiguous(), None


@cache
def _check_version(version: str) -> None:
    """Warn, once in a process, about a version that was not tested."""
    first, last = _TESTED
    found = tuple(int(part) for part in version.split(".")[:2])
    if not first <= found <= last:
        shown = [".".join(map(str, bound)) for bound in _TESTED]
        warnings.warn(
            f"transformers {version} is outside the versions that fastattn was tested with, "
            f"{shown[0]} to {shown[1]}: {_SMALL_CHANGES}",
            UserWarning,
            stacklevel=3,
        )
