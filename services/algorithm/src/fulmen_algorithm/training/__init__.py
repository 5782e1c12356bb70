"""The model side of training: rows in, optimiser steps and checkpoints out; no network, no service code."""
