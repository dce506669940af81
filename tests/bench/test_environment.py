"""GPU, clocks, power and versions from a fake nvidia-smi."""

import subprocess

from fastattn.bench import environment


def test_nvidia_smi_is_read_field_by_field_where_a_driver_lacks_one():
    def run(command):
        field = command[-1].removeprefix("--query-gpu=")
        if "," in field or field == "clocks_event_reasons.active":
            raise subprocess.CalledProcessError(2, command)
        return {"driver_version": "580.1.2", "power.limit": "[N/A]"}.get(field, "1980")

    found = environment.smi(run)
    assert found["driver"] == "580.1.2"
    assert found["max_sm_clock_mhz"] == 1980
    assert found["power_limit_w"] is None
    assert "clock_limits" not in found


def test_nvidia_smi_at_once():
    def run(command):
        assert not any(word.startswith(("-pm", "-lgc", "-pl", "-ac", "-r")) for word in command)
        return ", ".join(["580.1", "1980", "3201", "700.00", "0x0", "40", "Enabled"])

    assert environment.smi(run) == {
        "driver": 580.1,
        "max_sm_clock_mhz": 1980.0,
        "max_memory_clock_mhz": 3201.0,
        "power_limit_w": 700.0,
        "clock_limits": "0x0",
        "temperature_c": 40.0,
        "persistence_mode": "Enabled",
    }


def test_clocks_are_read_once_by_nvidia_smi_and_summed_up():
    calls = []

    def run(command):
        calls.append(command)
        return "1500, 600.5"

    reader = environment.ClockReader(run)
    reader._nvml = None
    assert reader.take() == {}
    reader()
    reader()
    assert len(calls) == 1
    found = reader.take()
    assert found == {"sm_clock_mhz": 1500.0, "least_sm_clock_mhz": 1500.0, "power_w": 600.5}


def test_a_clock_that_cannot_be_read_is_left_out():
    def run(command):
        raise OSError("no such program")

    reader = environment.ClockReader(run)
    reader._nvml = None
    reader()
    assert reader.take() == {}


def test_environment_of_this_machine():
    def run(command):
        raise OSError("no such program")

    found = environment.collect(run)
    assert found["versions"]["torch"] and found["versions"]["fastattn"]
    assert found["commit"] is None
