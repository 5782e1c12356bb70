"""Scores an answer by the share of right products in it."""

import re


def grade(task, outcome):
    asked = re.findall(r"(\d+) times (\d+)", task["question"])
    right = [str(int(a) * int(b)) for a, b in asked]
    named = re.findall(r"\d+", str(outcome))
    return sum(product in named for product in right) / len(right)
