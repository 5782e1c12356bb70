// Stubs of the store and the LLM proxy, with their addresses, credentials and deadline.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "error.h"
#include "fulmen/llm_proxy/v1/completion_service.grpc.pb.h"
#include "fulmen/store/v1/lease_service.grpc.pb.h"
#include "fulmen/store/v1/rollout_service.grpc.pb.h"
#include "fulmen/store/v1/span_service.grpc.pb.h"

namespace store = fulmen::store::v1;
namespace llm_proxy = fulmen::llm_proxy::v1;

using Clock = std::chrono::system_clock;  // gRPC's deadlines use this clock

struct Connection {
  std::unique_ptr<store::LeaseService::Stub> leases;
  std::unique_ptr<store::RolloutService::Stub> rollouts;
  std::unique_ptr<store::SpanService::Stub> spans;
  std::unique_ptr<llm_proxy::CompletionService::Stub> completions;
  std::string token;
  Clock::time_point deadline;
};

// Opens channels to the addresses in the environment; nothing is sent before the first call.
Connection Connect(Clock::time_point deadline);

// Prepares a call with a token or an attempt key; it ends at the deadline.
std::unique_ptr<grpc::ClientContext> CallBy(const std::string& key, Clock::time_point deadline);

// Repeats an operation while the server cannot be reached: the only error that may be retried unchanged.
template <class Work>
void WhileUnavailable(const Connection& connection, Work work) {
  constexpr auto kPause = std::chrono::milliseconds(200);
  for (;;) {
    try {
      return work();
    } catch (const Error& error) {
      if (!error.unreachable() || Clock::now() + kPause >= connection.deadline) throw;
      std::this_thread::sleep_for(kPause);
    }
  }
}
