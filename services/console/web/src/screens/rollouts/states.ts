import { RolloutState } from "../../api/gen/fulmen/store/v1/rollout_pb";
import type { Tone } from "../../parts/Status.svelte";

/** How states look. */
export const STATE_TONES: Partial<Record<RolloutState, Tone>> = {
  [RolloutState.RUNNING]: "active",
  [RolloutState.RETRY_WAIT]: "warn",
  [RolloutState.SUCCEEDED]: "ok",
  [RolloutState.FAILED]: "bad",
};
