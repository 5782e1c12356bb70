"""The model side of training: rows in, optimiser steps and checkpoints out; no network and no service code."""
