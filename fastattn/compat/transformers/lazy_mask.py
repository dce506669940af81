"""A mask tensor that keeps its rule and computes its entries on first use.

Model code mostly passes masks unchanged to the attention function. A `LazyMask` is a tensor to that
code, with shape and dtype, which can be sliced, joined and changed; the first such use computes its
entries. The attention function reads the rule of an unchanged mask, far cheaper for a kernel than
an entry for every query and key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...block_mask import BlockMask


class Rule(NamedTuple):
    """Visibility of keys, in the terms of `fastattn.attention`.

    Attributes:
        causal: a query sees no key after its own position.
        left, right: neighbours that it sees on each side, None = all.
        query_offset: position of query 0 among the keys, an int or an integer tensor of no dims.
        padding: bool [B, T_k], True = attend, or None.
        documents: integers [B, T], or a pair for queries and keys: a query sees the keys of its own
            number; or None.
        chunk: size of chunks; a query sees only its own chunk. None = one chunk.
        chunk_start: integers [B], the position at which a row's first chunk begins.
        mask_mod: of `fastattn.attention`, in place of all but query_offset and padding; or None.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    query_offset: int | Tensor = 0
    padding: Tensor | None = None
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    chunk: int | None = None
    chunk_start: Tensor | None = None
    mask_mod: BlockMask | None = None

    def to(self, device: torch.device) -> "Rule":
        """The same rule with its tensors on a device."""
        fields = self._asdict()
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in fields.items() if isinstance(x, (Tensor, BlockMask))
        }
        return self._replace(**moved)

    def options(self, batch_size: int) -> dict[str, Any]:
        """Keyword arguments of `fastattn.attention` for a batch of this size."""
        offset = self.query_offset
        if isinstance(offset, Tensor):
            offset = offset.reshape(1).expand(batch_size)
        options: dict[str, Any] = {"causal": self.causal, "query_offset": offset}
        if self.left is not None or self.right is not None:
            options["window"] = (self.left, self.right)
        if self.padding is not None:
            options["key_padding_mask"] = self.padding
        if self.documents is not None:
            options["documents"] = self.documents
        if self.mask_mod is not None:
            options["mask_mod"] = self.mask_mod
        return options


# Metadata, which needs no entries. Wrappers that shard, cast or recompute read the last three of
# every layer argument.
_PROPERTIES = (
    "shape dtype device ndim layout is_cuda is_cpu is_meta is_nested is_sparse "
    "requires_grad grad is_leaf"
)
_METHODS = "get_device is_complex dim size numel nelement element_size is_floating_point __len__"
_METADATA = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_floating_point,
        torch.is_complex,
    )
)
# Copies, which keep the rule.
_COPIES = frozenset((Tensor.clone, Tensor.contiguous, Tensor.detach, torch.clone))


class LazyMask(Tensor):
    """Mask tensor, bool [B, 1, T_q, T_k], True = attend, computed by `entries` on first use."""

    _rule: Rule
    _entries: Callable[[], Tensor]
    _made: Tensor | None = None
    _version_made: int = 0
    _hides: bool | None = None
    # `shape` without __torch_function__.
    extent: tuple[int, ...]
    # The last position_ids, and the rule with the sequences that they show.
    separated: tuple[Tensor, Rule] | None = None
    # Columns of the mask [B, T] that it was made from; 0: there was none.
    columns: int = 0

    @staticmethod
    def __new__(
        cls,
        rule: Rule,
        entries: Callable[[], Tensor],
        shape: tuple[int, ...],
        device: torch.device | str,
    ) -> "LazyMask":
        on = torch.device(device)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=on)
        mask._rule, mask._entries, mask.extent = rule, entries, shape
        return mask

    def rule(self) -> Rule | None:
        """The rule, or None once the entries have been changed in place."""
        if self._made is not None and self._made._version != self._version_made:
            return None
        return self._rule

    def rule_for(self, extent: tuple[int, ...]) -> Rule | None:
        """The rule of a layer with this shape of scores, [B, 1, T_q, T_k]; None if it has none.

        Where a layer's cache keeps another number of keys, a single causal query sees all of them.
        """
        rule = self.rule()
        if rule is not None and extent != self.extent:
            last = Rule(causal=True, query_offset=self.extent[3] - 1)
            plain = not self.has_padding() and rule._replace(padding=None) == last
            rule = last._replace(query_offset=extent[3] - 1) if plain and extent[2] == 1 else None
        return rule

    def has_padding(self) -> bool:
        """Whether the padding of the rule hides a key. Waits for the device, the first time."""
        if self._hides is None:
            padding = self._rule.padding
            self._hides = padding is not None and not bool(padding.all())
        return self._hides

    def entries(self) -> Tensor:
        """The mask as an ordinary tensor."""
        if self._made is None:
            # A copy, as a rule may return an expanded view, which is not writable. Tensors of
            # inference mode do not count their changes.
            with torch.inference_mode(False):
                self._made = self._entries().clone(memory_format=torch.contiguous_format)
            self._version_made = self._made._version
        return self._made

    def _on(self, device: torch.device) -> "LazyMask":
        """A mask with the same rule, on a device."""
        entries = self._entries
        if device == self.device:
            return LazyMask(self._rule, entries, self.extent, device)
        return LazyMask(self._rule.to(device), lambda: entries().to(device), self.extent, device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return metadata; run anything else on the entries."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _COPIES and isinstance(mask := args[0], LazyMask) and mask._made is None:
                return mask._on(mask.device)
            if func is Tensor.to and isinstance(mask := args[0], LazyMask) and mask._made is None:
                device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
                if dtype in (None, torch.bool) and memory_format is None:
                    return mask._on(mask.device if device is None else device)
            if func not in _METADATA:
                args, kwargs = _with_entries(args, kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run operators called below torch's Python interface."""
        args, kwargs = _with_entries(args, kwargs or {})
        return func(*args, **kwargs)


def _with_entries(args: Any, kwargs: Any) -> Any:
    return tree_map_only(LazyMask, LazyMask.entries, (args, kwargs))
