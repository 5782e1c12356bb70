// A queue of tasks that several threads fill and one works through.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

class Mailbox {
 public:
  void Post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    arrived_.notify_one();
  }

  // Runs the next task, or nothing if none is added in time.
  template <class TimePoint>
  void WorkUntil(TimePoint time) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      if (!arrived_.wait_until(lock, time, [this] { return !queue_.empty(); })) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> queue_;
};
