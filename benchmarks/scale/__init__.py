"""The whole system under thousands of runner sessions, and a model of it that is calibrated with what was measured."""
