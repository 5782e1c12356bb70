// The exports of the package @fulmen/client. The stubs' modules are named as in protos/:
// `@fulmen/client/fulmen/store/v1/rollout_service`.

export { bearer, call, connect, whileUnavailable, type Connection } from "./connection.js";
export { decoded, FulmenError } from "./errors.js";
