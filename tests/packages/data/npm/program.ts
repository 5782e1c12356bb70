// Calls a store that is not there, with the package's own connection and stubs; types say what everything is.

import { call, connect, decoded, FulmenError, type Connection } from "@fulmen/client";
import { GetRolloutRequest } from "@fulmen/client/fulmen/store/v1/rollout_service";
import type { Rollout } from "@fulmen/client/fulmen/store/v1/rollout";
import { status } from "@grpc/grpc-js";

process.env.FULMEN_STORE_TARGET = "127.0.0.1:1";
const store: Connection = connect(new Date(Date.now() + 20_000));
const request = GetRolloutRequest.fromPartial({ name: "projects/default/rollouts/none" });
try {
  const answer = await call(store.rollouts, store.rollouts.getRollout, request, store.metadata, store);
  const rollout: Rollout | undefined = answer.rollout;
  console.log(rollout?.name);
} catch (cause) {
  const error = decoded(cause);
  if (!(error instanceof FulmenError)) throw error;
  console.log(status.UNAVAILABLE, error.code, error.unreachable);
} finally {
  store.close();
}
