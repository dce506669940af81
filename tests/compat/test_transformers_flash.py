"""transformers' own "flash_attention_2" and 3 over functions that `flash_attn.install` offers."""

from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
import torch
import transformers as tr
from transformers import modeling_flash_attention_utils as flash
from transformers.utils import import_utils
from transformers_models import build, decoder_config, padded, tokens

from fastattn.compat import flash_attn

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")

_REMEMBERED = (
    "_package_distribution_mapping",
    "is_torch_cuda_available",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
)


def _forget() -> None:
    """Clear what transformers found out when it was imported, or since."""
    for remembered in filter(None, (getattr(import_utils, name, None) for name in _REMEMBERED)):
        remembered.cache_clear()
    flash._loaded_implementation = None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install as on a machine with CUDA, which transformers also checks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flash_attn.install()
    # A constant before 5.23.
    found = packages_distributions()
    monkeypatch.setattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", found, raising=False)
    _forget()
    yield
    flash_attn.uninstall()
    _forget()


@pytest.mark.parametrize("with_mask", [False, True])
def test_flash_attention_is_served(with_mask, installed, device):
    model = build(tr.AutoModelForCausalLM, decoder_config("mistral-window"), device).bfloat16()
    model.config.dtype = torch.bfloat16
    ids, mask = tokens(2, 9, device), padded([(3, 9), (0, 9)], 9, device)
    given = {"attention_mask": mask} if with_mask else {}
    results = {}
    with torch.no_grad():
        for name in ("fastattn", "flash_attention_2", "flash_attention_3"):
            model.set_attn_implementation(name)
            results[name] = model(ids, use_cache=False, **given).logits
            served = f"fastattn.compat.flash_attn.version_{name[-1]}"
            assert name == "fastattn" or flash._flash_fn.__module__ == served
    seen = mask.bool() if with_mask else torch.ones_like(ids).bool()
    for name, logits in results.items():
        torch.testing.assert_close(logits[seen], results["fastattn"][seen], msg=name)
