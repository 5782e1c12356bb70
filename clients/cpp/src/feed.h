// The two ends of the queue: creating rollouts, and reading the feed of those that are final.
#pragma once

#include "connection.h"
#include "options.h"

// Creates a group of rollouts with the same input. The request id makes a repeat harmless: nothing is doubled.
void Create(const Connection& connection, const Options& options);

// Reads finished groups. A broken stream is opened again behind the last group that was handled.
void Watch(const Connection& connection, const Options& options);
