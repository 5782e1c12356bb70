"""What Fulmen calls: one task for the app, which stays as it is. A prompt search hands its candidates over here."""

import desk

import fulmen


async def solve(task: dict) -> dict:
    """Returns the app's answer to the customer of a task, a recorded conversation."""
    asked = next(each["content"] for each in task["input"]["messages"] if each["role"] == "user")
    return await desk.answer(asked, fulmen.prompt(desk.PROMPT))
