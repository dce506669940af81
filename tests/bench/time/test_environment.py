"""GPU, clocks, power and versions from a fake nvidia-smi."""

from fastattn.bench.time import environment


def nothing(command):
    raise OSError("no such program")


def test_nvidia_smi_is_read_and_a_field_without_a_value_left_out():
    def run(command):
        assert not any(word.startswith(("-pm", "-lgc", "-pl", "-ac", "-r")) for word in command)
        return "580.1.2, 1980, 2619.5, [N/A], 48"

    assert environment.smi(run) == {
        "driver": "580.1.2",
        "max_sm_clock_mhz": 1980.0,
        "max_memory_clock_mhz": 2619.5,
        "temperature_c": 48.0,
    }
    assert environment.smi(nothing) == environment.smi(lambda command: "580.1.2") == {}


def test_clocks_are_read_once_by_nvidia_smi_and_by_nvml_often(monkeypatch):
    calls = []
    for nvml in (False, True):  # one that cannot be read is left out
        reader = environment.ClockReader(nothing, nvml)
        reader()
        assert reader.take() == {}
    reader = environment.ClockReader(lambda command: calls.append(command) or "1500, 600.5", False)
    assert reader.take() == {}
    reader()
    reader()
    assert len(calls) == 1
    results = {"sm_clock_mhz": 1500.0, "least_sm_clock_mhz": 1500.0, "power_w": 600.5}
    assert reader.take() == results
    clocks = iter([1400, 1600])
    monkeypatch.setattr(environment.torch.cuda, "clock_rate", lambda: next(clocks))
    monkeypatch.setattr(environment.torch.cuda, "power_draw", lambda: 650_000)
    reader = environment.ClockReader(nothing, nvml=True)
    for _ in range(3):  # the third fails
        reader()
    results = {"sm_clock_mhz": 1600.0, "least_sm_clock_mhz": 1400.0, "power_w": 650.0}
    assert reader.take() == results


def test_environment_of_this_machine():
    results = environment.collect(nothing)
    assert results["versions"]["torch"] and results["versions"]["fastattn"]
    assert results["commit"] is None and set(results["kernels"]) == set(environment.SOURCES)
