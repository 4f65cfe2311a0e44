"""The ways out of a printed refusal, as overrides of the command line."""

import re

VALUE = r'(?:"[^"]*"|\[[^\]]*\]|(?!or\b)[\w.-]+)'
SETTING = re.compile(rf"([a-z_]+(?:\.[a-z0-9_]+)+) = ({VALUE}(?:(?:, | or ){VALUE})*)")


def ways_in(problem: str) -> list[list[str]]:
    """Each way that a message names, as overrides."""
    ways = []
    for part in problem.rpartition("; take ")[2].split(", or ") if "; take " in problem else []:
        settings = [SETTING.fullmatch(setting) for setting in part.split(" with ")]
        if not all(settings):
            continue  # a hint in words
        values = [
            [f"--{setting[1]}=" + value.strip('"') for value in re.split(", | or ", setting[2])] for setting in settings
        ]
        ways += map(list, zip(*values, strict=True))  # of a pair of fields one value each
    return ways
