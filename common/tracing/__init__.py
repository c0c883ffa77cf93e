"""Which request a piece of work belongs to, across processes: W3C trace context, and spans where they are collected.

Trace context is passed on always; spans are made with OpenTelemetry, which is loaded only when the environment names an
exporter (``open_tracer``).
"""
