"""GPU, clocks, power and versions from a fake nvidia-smi."""

from fastattn.bench.time import environment


def nothing(command):
    raise OSError("no such program")


def test_nvidia_smi_is_read_and_a_field_without_a_value_left_out():
    def run(command):
        assert not any(word.startswith(("-pm", "-lgc", "-pl", "-ac", "-r")) for word in command)
        return "580.1.2, 1980, [N/A]"

    assert environment.smi(run=run) == {"driver": "580.1.2", "max_sm_clock_mhz": 1980.0}
    numbers = environment.smi({"a": "clocks.sm", "b": "power.draw"}, lambda command: "1500, 600.5")
    assert numbers == {"a": 1500.0, "b": 600.5}
    for broken in (nothing, lambda command: "580.1.2", lambda command: ""):
        assert environment.smi(run=broken) == {}


def test_environment_of_this_machine():
    results = environment.collect(nothing)
    assert results["versions"]["torch"] and results["versions"]["fastattn"]
    assert results["commit"] is None and set(results["kernels"]) == set(environment.SOURCES)
