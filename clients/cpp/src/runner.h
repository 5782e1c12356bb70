// A runner: holds the lease stream, runs the attempts that it is assigned, and reports their results.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <map>
#include <memory>
#include <string>
#include <thread>

#include "connection.h"
#include "mailbox.h"
#include "options.h"

// One thread owns all fields; the stream and the attempts add tasks to its mailbox.
class Runner {
 public:
  Runner(const Connection& connection, const Options& options) : connection_(connection), options_(options) {}
  // Releases the remaining leases, so that rollouts need not wait until the session expires.
  ~Runner();

  // Works until `count` attempts are handled. The session outlives its streams: leases survive a reconnect.
  void Run();

 private:
  using Names = google::protobuf::RepeatedPtrField<std::string>;
  using Stream = grpc::ClientReaderWriter<store::StreamLeasesRequest, store::StreamLeasesResponse>;

  void HoldStream();
  void Take(const store::StreamLeasesResponse& message);
  void Leave();
  void Open();
  void Opened(const store::SessionOpened& opened);
  void Renew();
  void Grant();
  void Start(const store::Assignment& assignment);
  void Finish(const store::AttemptResult& result);
  void Report(const store::AttemptResult& result);
  void Acknowledge(const store::CompletionAck& ack);
  void Cancel(const Names& attempts);
  void Lose(const Names& attempts);
  void ForgetSession();

  const Connection& connection_;
  const Options& options_;
  Mailbox mailbox_;
  std::string runner_;
  int handled_ = 0;                            // attempts that are acknowledged or lost
  int credits_ = 0;                            // granted and not yet used by an assignment
  std::map<std::string, std::jthread> running_;  // removing one stops it
  std::map<std::string, store::AttemptResult> unacknowledged_;

  // Fields of the current stream.
  std::unique_ptr<Stream> stream_;
  bool over_ = false;
  bool leaving_ = false;  // attempts that end from here on are reported on the next stream
  Clock::duration renewal_{};
  Clock::time_point renew_at_;
};
