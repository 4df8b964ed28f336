#!/usr/bin/env python3
"""Train a Vision Transformer on several devices, with one process per device.

    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python main_multi_gpu.py \
        -cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012 -batch_size=64 \
        -data_path=/dataset/imagenet -amp

Started without a launcher, it starts one process per visible GPU itself (`-ngpus N`: N processes). Started by a
launcher (`torchrun --nproc_per_node 8 main_multi_gpu.py ...`), it joins the launcher's processes.
"""

from engine.entry import main

if __name__ == "__main__":
    main(__file__, many=True)
