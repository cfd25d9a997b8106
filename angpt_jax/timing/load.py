"""How busy the machine is."""

import os
from pathlib import Path


def busy_seconds() -> float | None:
    """Seconds of work of all cores together since the machine started, with those that other guests of its host took
    from it; None where /proc/stat does not say."""
    try:
        words = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
