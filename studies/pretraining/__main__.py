from studies.pretraining.study import main

main()
