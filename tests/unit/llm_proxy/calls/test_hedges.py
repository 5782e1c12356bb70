"""Tries that a hedged call gives up leave nothing behind, whatever they brought."""

from __future__ import annotations

import asyncio

from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.backends.call_plan import plan_call
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.sender import give_up
from fulmen_llm_proxy.routing.backend_state import BackendState
from tests.support.llm_proxy.places import KEYS, new_states, of, table

_BODY = b'{"model": "m", "messages": []}'


async def a_try(state: BackendState, ending: asyncio.Event) -> BackendAnswer:
    """Answers when it may; a try that is cancelled gives its slot back itself."""
    states = new_states()
    choice = table(of("a")).choose("m", KEYS[0], states)
    request = BY_PATH["/v1/chat/completions"].parse(_BODY)
    try:
        await ending.wait()
    except asyncio.CancelledError:
        state.release()
        raise
    return BackendAnswer(
        dispatch=Dispatch(choice=choice, plan=plan_call(request, choice, overrides={}, attributed=False), headers={}),
        status=200,
        content_type=b"application/json",
        retry_after="",
        headers=(),
        body=b"{}",
        _response=None,
        _state=state,
        _period=0,
    )


async def test_a_try_that_is_given_up_gives_its_slot_back_before_and_after_its_answer() -> None:
    state, ended = new_states().of("a"), asyncio.Event()
    ended.set()
    for ending in (ended, asyncio.Event()):
        assert state.try_acquire(1)
        task = asyncio.create_task(a_try(state, ending))
        if ending is ended:
            await task
        else:
            await asyncio.sleep(0)
        give_up([task])
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert state.in_flight == 0


async def test_giving_up_is_no_wait_in_which_the_answer_that_counts_could_be_lost() -> None:
    state = new_states().of("a")
    assert state.try_acquire(2)
    task = asyncio.create_task(a_try(state, asyncio.Event()))
    await asyncio.sleep(0)
    assert give_up([task]) is None
    assert not task.done()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), state.in_flight) == (True, 0)
