"""flash-attn's argument orders per version, and adapters from keyword functions."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

# Defaults that are not None.
_DEFAULTS: dict[str, Any] = {
    "window_size": (-1, -1),
    "softcap": 0.0,
    "attention_chunk": 0,
    "num_splits": 1,
    "sm_margin": 0,
    **dict.fromkeys(("window_size_left", "window_size_right"), -1),
    "rotary_interleaved": True,
    **dict.fromkeys(("causal", "deterministic", "disable_scheduler_metadata"), False),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_lse"), False),
    **dict.fromkeys(("return_softmax", "zero_tensors"), False),
}
_SCALES = "q_descale k_descale v_descale"
_REST = "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin"
_REST_3 = f"softmax_scale causal qv {_SCALES} {_REST} return_attn_probs"
_CU_SEQLENS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SCORE_4 = "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa"
_MODS_4 = "deterministic score_mod score_mod_bwd mask_mod"
_RESULTS = "dout q k v out softmax_lse dq dk dv"
_SIDES = "window_size_left window_size_right"
# Arguments by version and function, in order; those before the bar are required.
ORDERS = {
    2: {
        "_flash_attn_forward": (
            f"q k v dropout_p softmax_scale causal {_SIDES} softcap alibi_slopes return_softmax |"
        ),
        "_flash_attn_varlen_forward": (
            f"q k v {_CU_SEQLENS} dropout_p softmax_scale causal | {_SIDES} softcap alibi_slopes "
            "return_softmax block_table leftpad_k seqused_k zero_tensors num_splits"
        ),
        "_flash_attn_backward": (
            f"{_RESULTS} dropout_p softmax_scale causal {_SIDES} softcap alibi_slopes "
            "deterministic | rng_state"
        ),
        "_flash_attn_varlen_backward": (
            f"{_RESULTS} {_CU_SEQLENS} dropout_p softmax_scale causal {_SIDES} softcap "
            "alibi_slopes deterministic | rng_state zero_tensors"
        ),
    },
    3: {
        "flash_attn_func": f"q k v | {_REST_3}",
        "flash_attn_qkvpacked_func": (
            f"qkv | softmax_scale causal {_SCALES} window_size attention_chunk softcap "
            "deterministic num_heads_q sm_margin return_attn_probs"
        ),
        "flash_attn_varlen_func": f"q k v {_CU_SEQLENS} | seqused_q seqused_k {_REST_3}",
        "flash_attn_with_kvcache": (
            "q k_cache v_cache | k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
            "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
            f"{_SCALES} softmax_scale causal window_size attention_chunk softcap "
            "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
        ),
    },
    4: {
        "flash_attn_func": (
            f"q k v | qv gather_kv_indices {_SCORE_4} {_MODS_4} aux_tensors aux_scalars "
            "block_sparse_tensors block_sparse_tensors_bwd return_lse"
        ),
        "flash_attn_varlen_func": (
            f"q k v | qv {_CU_SEQLENS} min_seqlen_k seqused_q seqused_k gather_kv_indices "
            f"page_table {_SCORE_4} {_MODS_4} block_sparse_tensors aux_tensors aux_scalars "
            "return_lse scheduler_metadata seqlen_k_per_split disable_scheduler_metadata"
        ),
    },
}


def of_version(version: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: give a keyword function the argument order of its namesake in a version."""

    def sign(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        needed, others = (part.split() for part in ORDERS[version][name].split("|"))
        names = [*needed, *others]

        def call(*arguments: Any, **kwargs: Any) -> Any:
            if len(arguments) > len(names):
                raise TypeError(f"{name}() takes at most {len(names)} arguments: {len(arguments)}")
            for argument, x in zip(names, arguments, strict=False):
                if argument in kwargs:
                    raise TypeError(f"{name}() got multiple values for argument {argument!r}")
                kwargs[argument] = x
            unknown = [key for key in kwargs if key not in names]
            if unknown:
                raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
            missing = [key for key in needed if key not in kwargs]
            if missing:
                raise TypeError(f"{name}() lacks {', '.join(missing)}")
            return function(**kwargs)

        call.__name__, call.__qualname__, call.__doc__ = name, name, function.__doc__
        call.__module__ = function.__module__
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters = [Parameter(key, kind) for key in needed]
        parameters += [Parameter(key, kind, default=_DEFAULTS.get(key)) for key in others]
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return call

    return sign
