"""GPU, clocks, power and versions from a fake nvidia-smi."""

from fastattn.bench.time import environment


def test_nvidia_smi_is_read_and_a_field_without_a_value_left_out(monkeypatch):
    def output_of(command):
        assert not any(word.startswith(("-pm", "-lgc", "-pl", "-ac", "-r")) for word in command)
        if not said:
            raise OSError("no such program")
        return said.pop()

    monkeypatch.setattr(environment, "output_of", output_of)
    fields = {"a": "driver_version", "b": "clocks.sm", "c": "power.draw"}
    said = ["", "580.1.2", "580.1.2, 1980, [N/A]"]
    assert environment.smi(fields) == {"a": "580.1.2", "b": 1980.0}
    assert environment.smi(fields) == environment.smi(fields) == environment.smi(fields) == {}
    results = environment.collect()
    assert results["versions"]["torch"] and results["versions"]["fastattn"]
    assert results["commit"] is None and set(results["kernels"]) == set(environment.SOURCES)
    monkeypatch.setenv("FASTATTN_COMMIT", "0123456")
    assert environment.collect()["commit"] == "0123456"
