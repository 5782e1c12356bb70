// Errors of Fulmen's servers, with the reason that they put into `google.rpc.ErrorInfo`.
#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <stdexcept>
#include <string>

// What a server refused, or what gRPC could not do; `reason` is empty where no server said one.
struct Error : std::runtime_error {
  Error(std::string code, const std::string& message) : std::runtime_error(message), code(std::move(code)) {}

  // Whether nobody answered, or the connection broke: gRPC says INTERNAL of that too, but servers never do without a
  // reason.
  bool unreachable() const { return code == "UNAVAILABLE" || (code == "INTERNAL" && reason.empty()); }

  std::string code;
  std::string reason;
  std::map<std::string, std::string> metadata;
};

// Throws what a call ended with, unless it ended well.
void Check(const grpc::Status& status);
