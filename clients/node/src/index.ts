// What the package @fulmen/client offers. Stubs are next to it, named as in protos/: `@fulmen/client/fulmen/store/v1/rollout_service`.

export { bearer, call, connect, whileUnavailable, type Connection } from "./connection.js";
export { decoded, FulmenError } from "./errors.js";
