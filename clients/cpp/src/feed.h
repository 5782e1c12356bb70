// The two ends of the queue: creating rollouts, and reading the feed of those that are final.
#pragma once

#include "connection.h"
#include "options.h"

// Creates a group of rollouts with the same input. The request id makes the request idempotent.
void Create(const Connection& connection, const Options& options);

// Reads finished groups. A broken stream is opened again after the last group that was handled.
void Watch(const Connection& connection, const Options& options);
