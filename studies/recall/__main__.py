from studies.recall.study import main

main()
