"""Numbers that are looked up when Prometheus asks: the queue, the store, the idle upgrade."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kvboost
from kvboost.boost import Stats
from kvboost.server.places import Place, places
from kvboost.server.work import Load

_GAUGES = {
    "up": ("kvboost_tier_up", "Whether the tier is in use"),
    "entries": ("kvboost_tier_entries", "Stored chunks"),
    "bytes": ("kvboost_tier_bytes", "Bytes of stored KV"),
    "max_bytes": ("kvboost_tier_limit_bytes", "Bytes that the tier may take"),
    "latency": ("kvboost_tier_latency_seconds", "What a lookup takes, smoothed"),
    "bandwidth": ("kvboost_tier_bytes_per_second", "How fast the tier is read, smoothed"),
}
_COUNTERS = {
    "evicted": ("kvboost_tier_evictions", "Entries that made room for others"),
    "hits": ("kvboost_tier_hits", "Entries asked for that came"),
    "misses": ("kvboost_tier_misses", "Entries asked for that were gone or too late"),
    "written": ("kvboost_tier_written", "Entries stored"),
    "refused": ("kvboost_tier_refused", "Entries not stored: no room, or there already"),
    "dropped": ("kvboost_tier_dropped", "Entries not written: queue full, or tier down"),
    "outages": ("kvboost_tier_outages", "Times that the tier was taken out of use"),
    "slow": ("kvboost_tier_slow", "Lookups not taken because computing was faster"),
}


class Pulled(Collector):
    """Asks anew at each scrape."""

    def __init__(self, stats: Callable[[], Stats], load: Callable[[], Load]) -> None:
        self._stats, self._load = stats, load

    def collect(self) -> Iterator[Metric]:
        stats, load = self._stats(), self._load()
        about = ("version", "dtype", "device", "kv_format", "fingerprint")
        info = GaugeMetricFamily("kvboost_info", "What runs here; always 1", labels=about)
        info.add_metric([kvboost.__version__, *(getattr(stats, name) for name in about[1:])], 1)
        yield info
        yield GaugeMetricFamily("kvboost_requests_waiting", "Requests in the queue", load.waiting)
        yield GaugeMetricFamily("kvboost_answers_running", "Answers being decoded", load.running)
        yield GaugeMetricFamily("kvboost_slots", "Answers that can be decoded at once", load.slots)
        yield CounterMetricFamily(
            "kvboost_upgraded_tokens", "Tokens computed exactly while idle", stats.upgraded
        )
        yield GaugeMetricFamily(
            "kvboost_upgrade_waiting_tokens", "Tokens that wait for the idle upgrade", stats.waiting
        )
        yield from _of_places(places(stats))


def _of_places(known: Sequence[Place]) -> Iterator[Metric]:
    for table, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for attribute, (name, words) in table.items():
            metric = family(name, words, labels=["tier"])
            for place in known:
                value = getattr(place, attribute)
                if value is not None:
                    metric.add_metric([place.name], value)
            yield metric
    flaws = CounterMetricFamily(
        "kvboost_tier_flaws", "Entries that could not be used, by reason", labels=["tier", "reason"]
    )
    for place in known:
        for reason, times in place.flaws.items():
            flaws.add_metric([place.name, reason], times)
    yield flaws
