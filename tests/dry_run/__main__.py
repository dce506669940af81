"""`python tests/dry_run MODULE.FUNCTION...`: run these parts and print their records."""

import dataclasses
import importlib
import json
import sys

import native

parts = sys.argv[1:]
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
sys.stdout.write("\n" + json.dumps(scenes) + "\n")
