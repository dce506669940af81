"""GPU, clocks, power and versions from a fake nvidia-smi."""

from fastattn.bench.time import environment


def nothing(command):
    raise OSError("no such program")


def test_nvidia_smi_is_read_and_a_field_without_a_value_left_out():
    def run(command):
        assert not any(word.startswith(("-pm", "-lgc", "-pl", "-ac", "-r")) for word in command)
        clocks = any("clocks.sm" in word for word in command)
        return "1500, 600.5" if clocks else "580.1.2, 1980, 2619.5, [N/A], 48"

    assert environment.smi(run) == {
        "driver": "580.1.2",
        "max_sm_clock_mhz": 1980.0,
        "max_memory_clock_mhz": 2619.5,
        "temperature_c": 48.0,
    }
    assert environment.clocks(run) == {"sm_clock_mhz": 1500.0, "power_w": 600.5}
    for broken in (nothing, lambda command: "580.1.2", lambda command: ""):
        assert environment.smi(broken) == environment.clocks(broken) == {}


def test_environment_of_this_machine():
    results = environment.collect(nothing)
    assert results["versions"]["torch"] and results["versions"]["fastattn"]
    assert results["commit"] is None and set(results["kernels"]) == set(environment.SOURCES)
