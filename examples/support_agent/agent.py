"""The function that Fulmen calls: runs one task in the unchanged app, with the candidate prompt of a search if there
is one."""

import desk

import fulmen


async def solve(task: dict) -> dict:
    """Returns the app's answer to the customer of a task, a recorded conversation."""
    asked = next(each["content"] for each in task["input"]["messages"] if each["role"] == "user")
    return await desk.answer(asked, fulmen.prompt(desk.PROMPT))
