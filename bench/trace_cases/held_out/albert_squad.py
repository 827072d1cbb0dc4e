# Question answering with ALBERT: one layer shared by all, float16 autocast, Adam in foreach form
import torch
from transformers import AlbertConfig, AlbertForQuestionAnswering

device = "cuda:0"
BATCH, SEQ = 16, 384
model = AlbertForQuestionAnswering(AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072,
                                                num_hidden_layers=12, hidden_dropout_prob=0.1,
                                                attention_probs_dropout_prob=0.1)).to(device)
model.train()
adam = torch.optim.Adam(model.parameters(), lr=3e-5, foreach=True, weight_decay=0.01)
scaler = torch.cuda.amp.GradScaler(init_scale=1024.0)

for step in range(6):
    input_ids = torch.randint(5, 30000, (BATCH, SEQ)).to(device)
    token_type_ids = (torch.arange(SEQ) > 60).long().repeat(BATCH, 1).to(device)
    lengths = torch.linspace(200, SEQ, BATCH).long()
    attention_mask = (torch.arange(SEQ)[None, :] < lengths[:, None]).long().to(device)
    start = torch.randint(61, 199, (BATCH,)).to(device)
    end = start + 1
    for p in model.parameters():
        p.grad = None
    with torch.cuda.amp.autocast(dtype=torch.float16):
        loss = model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
                     start_positions=start, end_positions=end)[0]
    scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()
    print("step", step, "loss", round(loss.item(), 3))
