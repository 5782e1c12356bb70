// Runs assignments.
#pragma once

#include <stop_token>

#include "connection.h"
#include "options.h"

// Runs one attempt to its end; a failure is part of the result.
store::AttemptResult Attempted(const Connection& connection, const store::Assignment& assignment,
                               const Options& options, std::stop_token stop);
