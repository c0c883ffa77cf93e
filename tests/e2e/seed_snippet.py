import kev

# 1. 初始化引擎，加载配置
engine = kev.Engine.from_config("kev.yaml")

# 2. 提交一批独立问题
queries = [
    "Kev的隔离通道是如何实现的？",
    "帮我总结一下Transformer的注意力机制",
    "写出一个Python快速排序示例",
    "解释一下什么是KV Cache",
]
request_id = engine.submit(
    queries,
    isolation="strict",
    max_parallel=4,
)

# 3. 轮询结果
results = engine.wait(request_id, timeout=15.0)

# 4. 每个结果都带独立的通道信息
for r in results:
    print(f"channel={r.channel_id} | time={r.elapsed_ms}ms | tokens={r.tokens}")
    print(r.text)
