"""Swap the attention of a timm vision transformer, check that nothing changed, and time both.

pip install timm    # with the torchvision of the torch that is installed
python examples/vision_transformer.py --model vit_base_patch16_224 --pretrained
"""

# ruff: noqa: T201 (an example prints)

import argparse
import time

import timm
import torch

import fastattn


def seconds(model: torch.nn.Module, images: torch.Tensor, repeats: int) -> float:
    """A training step's forward and backward, the best of a few."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        model(images).sum().backward()
        if images.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--pretrained", action="store_true", help="load weights from the hub")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = timm.create_model(options.model, pretrained=options.pretrained).to(device).eval()
    size = model.default_cfg["input_size"]
    images = torch.randn(options.batch, *size, device=device)

    with torch.no_grad():
        expected = model(images)
    before = seconds(model, images, options.repeats)
    swapped = fastattn.swap(model)
    print(swapped)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, atol=1e-3, rtol=1e-3)
    after = seconds(model, images, options.repeats)
    print(f"forward and backward on {device}: {before * 1e3:.1f} ms, then {after * 1e3:.1f} ms")
    swapped.undo()


if __name__ == "__main__":
    main()
