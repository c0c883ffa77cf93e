"""What a model reads before its weights are rounded to int8: a little of much, written for Kev.

Not here: how it is used (``calibration``).
"""

from __future__ import annotations

TEXTS = (
    """The harbour master kept two books. In the first he wrote what came in: timber from the north, salt, wool, now and
then a crate of oranges that nobody had ordered. In the second he wrote what the sea had said that day, which was mostly
wind and mostly from the west. "You cannot sell the second one," his sister told him, and she was right until the
winter of 1893, when the insurers in London paid forty pounds for a copy. Asked later how he had known which ship would
be late, he answered that he had not known anything; he had only counted, every morning at six, for 31 years.""",
    """注意力机制让模型在生成每个词的时候，都能回头查看前面所有的词，并决定哪些词更重要。打个比方：读一篇很长的文章时，人不会平均
地记住每一句话，而是会抓住和问题有关的段落。模型也是这样，它为每个位置计算一个权重，再把对应的内容加权求和。这样做的好处是
可以处理很长的上下文，缺点是计算量会随着长度的平方增长。因此，工程师们想出了很多办法，例如滑动窗口、分组查询和键值缓存。
问：北京今天的天气怎么样？答：我无法查询实时天气，请打开手机上的天气应用，或者告诉我您想了解的城市和日期。""",
    '''def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

class Counter {
  constructor(limit = 10) { this.limit = limit; this.values = new Map(); }
  add(key) { const n = (this.values.get(key) ?? 0) + 1; this.values.set(key, Math.min(n, this.limit)); return n; }
}
SELECT city, COUNT(*) AS orders, SUM(amount) FROM sales WHERE day >= '2024-03-01' GROUP BY city HAVING COUNT(*) > 5;''',
    """# Installing the pump

1. Switch off the mains and wait for **five minutes**.
2. Remove the four screws (M6 x 20) and keep the gasket; it is used again.
3. Check the pressure: it must stay between `1.8` and `2.4` bar.

| part | number | price |
|---|---|---|
| gasket | 4711-B | 3.50 EUR |
| impeller | 4712-A | 48.00 EUR |

```yaml
pump: {id: 7, mode: auto, limits: [1.8, 2.4], alarms: true}
```
See https://example.org/manuals/pump?lang=en#wiring or write to service@example.org. Error E-204 means that the sensor
sends no signal: `{"code": 204, "sensor": null, "since": "2024-05-17T08:30:00Z"}`.""",
    """Question: A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5 hours, so it arrives at 12:10.
Question: What is the difference between a virus and a bacterium?
Answer: A bacterium is a living cell that can feed and divide by itself. A virus is much smaller and needs the cells of
another organism to multiply; antibiotics do not act on it.
Question: Translate "Where is the station?" into German, French and Spanish.
Answer: "Wo ist der Bahnhof?", "Où est la gare ?", "¿Dónde está la estación?"
Question: Is 221 a prime number?
Answer: No. 221 = 13 x 17.""",
    """El río baja frío desde la sierra, y en abril lleva tanta agua que los puentes viejos tiemblan. Der Vertrag gilt
als verlängert, wenn ihn keine der Parteien spätestens drei Monate vor Ablauf schriftlich kündigt. Les élèves notent
leurs résultats dans le tableau, puis comparent la moyenne (12,4) avec celle de l'an dernier. Привет! Как дела?
Сегодня мы поговорим о погоде и о книгах. 会議は午後三時から始まります。資料は事前に読んでおいてください。
Let f(x) = x^2 - 3x + 2. Then f'(x) = 2x - 3, which is zero at x = 3/2, where f takes its least value, -1/4. For n > 1
the sum 1 + 2 + ... + n equals n(n + 1)/2; the limit of (1 + 1/n)^n is e, about 2.71828.""",
)
"""Prose, Chinese, code, markup and data, questions and answers, other languages and mathematics."""
