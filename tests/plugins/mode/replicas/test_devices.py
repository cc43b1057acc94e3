"""What NVML does not say stays unknown; it never becomes zero."""

import threading
from types import SimpleNamespace

from plugins.mode.replicas.devices import DeviceWatch, device_reader, read_facts
from plugins.shared.routing import DeviceFacts
from tests.patience import SOON_S


class NVMLError(Exception):
    pass


def refuses(*_):
    raise NVMLError


def nvml(**changes):
    given = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=30 << 30, total=140 << 30),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=75, memory=20),
        "nvmlDeviceGetTemperature": lambda _, sensor: {0: 61}[sensor],
    }
    return SimpleNamespace(**(given | changes))


def test_facts_have_their_units():
    facts = read_facts(nvml(), None)
    assert facts == DeviceFacts(61.0, 30 << 30, 140 << 30, 0.75)


def test_each_question_that_is_refused_leaves_its_own_fact_unknown():
    facts = read_facts(nvml(nvmlDeviceGetUtilizationRates=refuses), None)
    assert facts == DeviceFacts(61.0, 30 << 30, 140 << 30, None)
    facts = read_facts(nvml(nvmlDeviceGetMemoryInfo=refuses), None)
    assert (facts.memory_used_bytes, facts.memory_bytes) == (None, None)
    assert read_facts(nvml(nvmlDeviceGetTemperature=refuses), None).temperature_c is None


def test_a_cpu_has_no_facts():
    assert device_reader("cpu") is None
    assert DeviceWatch(None).facts == DeviceFacts()


def test_a_watch_reads_now_and_then_until_it_is_closed():
    read = threading.Semaphore(0)
    temperatures = iter(range(1000))

    def next_facts():
        read.release()
        return DeviceFacts(temperature_c=float(next(temperatures)))

    watch = DeviceWatch(next_facts, every_s=0.001)
    for _ in range(3):
        assert read.acquire(timeout=SOON_S)
    watch.close()
    assert watch.facts.temperature_c is not None
