#!/usr/bin/env python3
"""Train a Vision Transformer on one device.

    CUDA_VISIBLE_DEVICES=0 python main_single_gpu.py \
        -cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012 -batch_size=64 \
        -data_path=/dataset/imagenet -amp

`python main_single_gpu.py -h` lists all flags; SECTION.KEY=VALUE sets any setting.
"""

from engine.entry import main

if __name__ == "__main__":
    main(__file__, many=False)
