"""`python tests/rehearsal OUT MODULE.FUNCTION...`: plays these parts, and writes their scenes."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import native

out, *parts = sys.argv[1:]
if parts[0].startswith("fakes."):
    # Before torch is imported, which does not look for a device later.
    native.load_device_guard()
else:
    # Before fastattn and triton are.
    importlib.import_module("posing")

scenes = {}
for part in parts:
    module, function = part.split(".")
    loaded = importlib.import_module(module)
    loaded.stage.scenes = []
    getattr(loaded, function)()
    scenes[part] = [dataclasses.asdict(scene) for scene in loaded.stage.scenes]
Path(out).write_text(json.dumps(scenes))
