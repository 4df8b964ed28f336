#!/usr/bin/env python3
"""Train a Vision Transformer on many devices, one process each.

    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python main_multi_gpu.py \
        -cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012 -batch_size=64 \
        -data_path=/dataset/imagenet -amp

Started plainly it starts the processes itself, one a visible GPU (`-ngpus N`: so many); started by a launcher
(`torchrun --nproc_per_node 8 main_multi_gpu.py ...`) it joins the processes there are.
"""

from engine.entry import main

if __name__ == "__main__":
    main(__file__, many=True)
