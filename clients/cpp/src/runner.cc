#include "runner.h"

#include <google/protobuf/util/time_util.h>
#include <unistd.h>

#include <array>

#include "agent.h"

namespace {

constexpr auto kReleaseLimit = std::chrono::seconds(5);

std::string Host() {
  std::array<char, 128> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

Runner::~Runner() {
  running_.clear();
  if (runner_.empty()) return;
  const auto call = CallBy(connection_.token, Clock::now() + kReleaseLimit);
  store::ReleaseLeasesRequest request;
  store::ReleaseLeasesResponse released;
  request.set_runner(runner_);
  connection_.leases->ReleaseLeases(call.get(), request, &released);  // if it fails, the session expires later
}

void Runner::Run() {
  while (handled_ < options_.count) WhileUnavailable(connection_, [this] { HoldStream(); });
}

void Runner::HoldStream() {
  const auto call = CallBy(connection_.token, connection_.deadline);
  stream_ = connection_.leases->StreamLeases(call.get());
  over_ = leaving_ = false;
  renewal_ = std::chrono::hours(1);  // until the store has sent the duration of a lease
  renew_at_ = Clock::now() + renewal_;
  Open();
  std::jthread reader([this] {
    for (store::StreamLeasesResponse message; stream_->Read(&message);) {
      mailbox_.Post([this, message] { Take(message); });
    }
    mailbox_.Post([this] { over_ = true; });
  });
  while (!over_) {  // the stream ends at its deadline at the latest
    mailbox_.WorkUntil(renew_at_);
    if (over_ || leaving_) continue;
    if (handled_ >= options_.count) {
      Leave();
    } else {
      Grant();
      if (Clock::now() >= renew_at_) Renew();
    }
  }
  reader.join();
  leaving_ = true;
  const auto status = stream_->Finish();
  stream_.reset();
  try {
    Check(status);
  } catch (const Error& error) {
    if (error.reason != "SESSION_ENDED") throw;
    ForgetSession();
  }
}

void Runner::Take(const store::StreamLeasesResponse& message) {
  if (message.has_opened()) Opened(message.opened());
  for (const auto& assignment : message.assign().assignments()) Start(assignment);
  for (const auto& ack : message.ack().acks()) Acknowledge(ack);
  Cancel(message.cancel().attempts());
  Lose(message.lease_lost().attempts());
  if (message.has_drain()) {
    Emit({{"event", "drain"}});
    Leave();
  }
}

// Closes this side; the store answers by closing its own.
void Runner::Leave() {
  if (!leaving_) stream_->WritesDone();
  leaving_ = true;
  renew_at_ = Clock::now() + std::chrono::hours(1);  // nothing left to renew
}

void Runner::Open() {
  store::StreamLeasesRequest request;
  auto* open = request.mutable_open();
  open->set_runner(runner_);
  auto* info = open->mutable_info();
  info->set_host(Host());
  info->set_version("cpp");
  info->mutable_labels()->insert(options_.labels.begin(), options_.labels.end());
  info->set_slot_count(options_.slots);
  open->add_projects(options_.project);
  for (const auto& [attempt, thread] : running_) open->add_running_attempts(attempt);
  for (const auto& [attempt, result] : unacknowledged_) open->add_running_attempts(attempt);
  credits_ = 0;  // credits do not survive a stream
  stream_->Write(request);  // a broken stream fails in the next read
}

void Runner::Opened(const store::SessionOpened& opened) {
  const auto ttl_ms = google::protobuf::util::TimeUtil::DurationToMilliseconds(opened.lease_ttl());
  Emit({
      {"event", "opened"},
      {"runner", opened.runner()},
      {"resumed", opened.runner() == runner_},
      {"lease_ttl_s", ttl_ms / 1e3},
  });
  runner_ = opened.runner();
  Lose(opened.lost_attempts());
  renewal_ = std::chrono::milliseconds(ttl_ms) / 3;
  renew_at_ = Clock::now() + renewal_;
  for (const auto& [attempt, result] : unacknowledged_) Report(result);
}

void Runner::Renew() {
  renew_at_ = Clock::now() + renewal_;
  store::StreamLeasesRequest request;
  request.mutable_renew();
  stream_->Write(request);
}

// Grants credits for places that are free, and never for more attempts than are still wanted.
void Runner::Grant() {
  const int held = static_cast<int>(running_.size() + unacknowledged_.size());
  const int free = std::min(options_.slots, options_.count - handled_) - held - credits_;
  if (free <= 0) return;
  credits_ += free;
  store::StreamLeasesRequest request;
  request.mutable_add_credits()->set_credit_count(free);
  stream_->Write(request);
}

void Runner::Start(const store::Assignment& assignment) {
  --credits_;
  Emit({{"event", "assigned"}, {"attempt", assignment.attempt()}});
  running_[assignment.attempt()] = std::jthread([this, assignment](std::stop_token stop) {
    auto result = Attempted(connection_, assignment, options_, stop);
    mailbox_.Post([this, result = std::move(result)] { Finish(result); });
  });
}

void Runner::Finish(const store::AttemptResult& result) {
  if (running_.erase(result.attempt()) == 0) return;  // lost meanwhile: the result is discarded
  unacknowledged_[result.attempt()] = result;
  if (!leaving_) Report(result);
}

void Runner::Report(const store::AttemptResult& result) {
  store::StreamLeasesRequest request;
  *request.mutable_complete()->add_results() = result;
  stream_->Write(request);
}

void Runner::Acknowledge(const store::CompletionAck& ack) {
  if (unacknowledged_.erase(ack.attempt()) == 0) return;
  ++handled_;
  const auto status = store::CompletionStatus_Name(ack.status());
  Emit({{"event", "acknowledged"}, {"attempt", ack.attempt()}, {"status", status}, {"message", ack.message()}});
}

// Stops attempts whose rollouts were cancelled; each ends as CANCELLED and is reported like any other.
void Runner::Cancel(const Names& attempts) {
  for (const auto& attempt : attempts) {
    if (!running_.contains(attempt)) continue;
    Emit({{"event", "cancel"}, {"attempt", attempt}});
    running_[attempt].request_stop();
  }
}

// Forgets attempts whose leases have expired: the store would discard their results.
void Runner::Lose(const Names& attempts) {
  for (const auto& attempt : attempts) {
    if (running_.erase(attempt) + unacknowledged_.erase(attempt) == 0) continue;
    ++handled_;
    Emit({{"event", "lease_lost"}, {"attempt", attempt}});
  }
}

void Runner::ForgetSession() {
  Emit({{"event", "session_ended"}, {"runner", runner_}});
  running_.clear();
  unacknowledged_.clear();
  runner_.clear();
}
