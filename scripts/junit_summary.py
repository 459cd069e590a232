"""What groups of tests came to: `junit_summary.py FOLDER GROUP:STATUS...` reads FOLDER/GROUP.xml, which pytest wrote.

STATUS is that with which the group ended. A line for each group and for each failure goes to stdout, the counts to
summary.json, the ends of all failures to failures.txt. Ends with 1 if any group did with anything but 0, or 5: pytest's
word for no tests.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

MOST_LINES = 40
"""Of a failure's end, and on stdout."""
MOST_COLUMNS = 200
WELL = (0, 5)


@dataclass(kw_only=True)
class Group:
    """What a group of tests came to."""

    status: int
    tests: int = 0
    failures: int = 0
    errors: int = 0
    skipped: int = 0
    seconds: float = 0.0


def read(folder: Path, name: str, status: int) -> tuple[Group, list[tuple[str, str]]]:
    """A group, and its failures: (test, text)."""
    group, failures = Group(status=status), []
    report = folder / f"{name}.xml"
    if report.exists():
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        for count in ("tests", "failures", "errors", "skipped"):
            setattr(group, count, int(suite.get(count, 0)))
        group.seconds = float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            for found in (*case.iter("failure"), *case.iter("error")):
                failures.append((f"{case.get('classname')}::{case.get('name')}", found.text or ""))
    if status not in WELL and not failures:
        failures.append((f"the group {name} ended with {status}", (folder / f"{name}.log").read_text(errors="replace")))
    return group, failures


def main(folder: Path, groups: dict[str, int]) -> int:
    """Write the files, print the lines; the exit status."""
    summary: dict[str, dict[str, float]] = {}
    ends, lines = [], []
    for name, status in groups.items():
        group, failures = read(folder, name, status)
        summary[name] = asdict(group)
        print(f"{name}: " + ", ".join(f"{value} {what}" for what, value in summary[name].items()))
        for test, text in failures:
            last = [line[:MOST_COLUMNS] for line in text.rstrip().splitlines()[-MOST_LINES:]]
            ends.append("\n".join([f"=== {name}: {test}", *last, ""]))
            reason = next((line for line in last if line.startswith("E ")), last[-1] if last else "")
            lines.append(f"FAILED {test}: {reason.removeprefix('E').strip()}"[:MOST_COLUMNS])
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    (folder / "failures.txt").write_text("\n".join(ends), encoding="utf-8")
    room = MOST_LINES - len(groups)
    for line in lines[:room]:
        print(line)
    if len(lines) > room:
        print(f"and {len(lines) - room} more in {folder / 'failures.txt'}")
    return 0 if all(status in WELL for status in groups.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), {name: int(status) for name, status in (of.split(":") for of in sys.argv[2:])}))
