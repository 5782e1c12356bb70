"""The prompts that a run has searched through, as of its newest checkpoint."""

from fulmen.algorithm.v1 import prompt_search_pb2 as pb
from fulmen_algorithm.algorithms.prompts.candidates import Candidate
from fulmen_algorithm.algorithms.prompts.search_settings import SearchState
from fulmen_algorithm.algorithms.prompts.searching import MEMORY
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.transport.pages import page
from fulmen_service_kit.rpc.message_sizes import fitting

MAX_REJECTED = 100
MAX_REJECTED_TEXT = 4096


def prompt_candidates(entry: Entry, page_size: int, page_token: str) -> pb.ListPromptCandidatesResponse:
    """Lists the candidates of a run; reads its checkpoints, in a thread."""
    memory = next((c.progress["memory"].get(MEMORY) for c in reversed(entry.files.checkpoint_store().listed())), None)
    if not memory:
        return pb.ListPromptCandidatesResponse()
    state = SearchState.of_memory(memory)
    listed, token = page(list(state.candidates.values()), page_size, page_token)
    shown = fitting(_candidate(each) for each in listed)
    if len(shown) < len(listed):
        token = str(int(page_token or 0) + len(shown))
    return pb.ListPromptCandidatesResponse(candidates=shown, next_page_token=token, search=_search(state))


def _candidate(candidate: Candidate) -> pb.PromptCandidate:
    return pb.PromptCandidate(
        id=candidate.id,
        parent=candidate.parent,
        version=candidate.version,
        text=candidate.text,
        critique=candidate.gradient,
        round=candidate.round,
        reward_mean=candidate.mean if candidate.rewards else None,
        reward_count=len(candidate.rewards),
        validation=candidate.validation,
    )


def _search(state: SearchState) -> pb.PromptSearch:
    return pb.PromptSearch(
        beam=state.beam,
        call_count=state.calls,
        token_count=state.tokens,
        rollout_count=state.rollouts,
        end_reason=state.over,
        rejected=[
            pb.RejectedPrompt(
                round=int(each["round"]),
                parent=each["parent"],
                reason=each["reason"],
                text=each["text"][:MAX_REJECTED_TEXT],
            )
            for each in state.rejected[-MAX_REJECTED:]
        ],
    )
